"""Agreements that make all workers take the same number of steps.

Workers that can compute each other's batch sizes exchange nothing. Others exchange them in every
step, in the thread that iterates: in order with the training step's collectives.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from fastdist.data.batches import emptied
from fastdist.data.input_context import InputLayout
from fastdist.data.pipelines import Batches, Part
from fastdist.errors import FastdistError

T = TypeVar("T")

_DONE, _MORE, _FAILED, _NOTHING = range(4)


def same_data(layout: InputLayout, parts: Iterator[Part]) -> Iterator[Part]:
    """Yield the parts unchanged; raise ValueError on all workers if their batches differ."""
    for step in itertools.count():
        part = _attempt(layout, (0, 0), lambda: next(parts, None))
        own = (_DONE, 0, 0) if part is None else (_MORE, sum(part.examples), part.token)
        answers = _exchange(layout, own)
        if any(answer != answers[0] for answer in answers):
            counts = ", ".join(f"{a[1]} on worker {worker}" for worker, a in enumerate(answers))
            raise ValueError(
                f"the workers read different data in step {step} since their iteration began: "
                f"{counts} examples; expected the same examples in the same order on all, of "
                "which each takes its part. Use seeded samplers and shuffles, and streams that "
                "do not divide themselves by rank (as split_by_node does); where each worker "
                "has its own data, AutoShardPolicy.OFF or distribute_datasets_from_function"
            )
        if part is None:
            return
        yield part


def own_data(
    layout: InputLayout, parts: Iterator[Part], spare: Callable[[], Batches | None]
) -> Iterator[Part]:
    """Yield a worker's own parts, then batches of size zero until all workers have finished.

    The `examples` of these parts count the examples of all replicas. `spare` makes batches of size
    zero; None if the source has no example to copy the shapes from.
    """
    none = (0,) * len(layout.local_replicas)
    last: Part | None = None
    empty: Batches | None = None
    refusal: ValueError | None = None  # of batches without examples
    while True:
        part = _attempt(layout, none, lambda: next(parts, None))
        if part is not None:
            last = part
        elif empty is None and last is None:
            empty = _attempt(layout, none, spare)
        elif empty is None and last is not None:
            try:
                empty = tuple(map(emptied, last.batches, last.sizes))
            except ValueError as error:
                refusal = error
        state = _MORE if part is not None else _NOTHING if empty is None else _DONE
        sizes = none if part is None else part.sizes
        answers = _exchange(layout, (state, *sizes))
        if all(answer[0] != _MORE for answer in answers):
            return
        if refusal is not None:
            raise refusal
        without = [worker for worker, answer in enumerate(answers) if answer[0] == _NOTHING]
        if without:
            raise ValueError(
                f"the data of workers {without} is empty while other workers have examples: "
                "the shapes of a batch of size zero are unknown; give every worker at least "
                "one example"
            )
        examples = tuple(size for answer in answers for size in answer[1:])
        batches = empty if part is None else part.batches
        assert batches is not None
        yield Part(batches, sizes, examples)


def _attempt(layout: InputLayout, zeros: tuple[int, ...], read: Callable[[], T]) -> T:
    """Call `read`; if it raises, tell the other workers, which would otherwise wait."""
    try:
        return read()
    except Exception:
        layout.all_gather_ints((_FAILED, *zeros))
        raise


def _exchange(layout: InputLayout, own: Sequence[int]) -> list[list[int]]:
    """Return every worker's state and numbers; if one has failed, raise an error on all."""
    answers = [list(answer) for answer in layout.all_gather_ints(own)]
    failed = tuple(worker for worker, answer in enumerate(answers) if answer[0] == _FAILED)
    if failed:
        raise FastdistError(
            f"workers {list(failed)} could not read their data; see the error that each of "
            "these workers raised",
            ranks=failed,
        )
    return answers
