"""How the workers keep step: what each has, and whether all are done.

Where all know beforehand what everyone has, nobody asks (`Known`). Otherwise the workers tell each
other in every step, from the thread that iterates: so the exchange keeps its place among the
collectives of the training step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from fastdist.data.batches import emptied
from fastdist.data.input_context import InputLayout
from fastdist.data.pipelines import Batches, Part
from fastdist.errors import FastdistError

T = TypeVar("T")

_DONE, _MORE, _FAILED, _NOTHING = range(4)


class Agreement(Protocol):
    """Turns a worker's parts into steps that all workers take together.

    Attributes:
        may_add_steps: whether there may be more steps than this worker has parts.
    """

    @property
    def may_add_steps(self) -> bool: ...  # noqa: D102

    def __call__(
        self, parts: Iterator[Part], spare: Callable[[], Batches | None]
    ) -> Iterator[Part]:
        """Parts whose `examples` are those of all replicas.

        Args:
            parts: what this worker has.
            spare: gives batches of size zero to a worker that has none at all; None if it cannot.
        """


class Known:
    """All workers cut the same batches, and know it: nobody asks."""

    may_add_steps = False

    def __call__(
        self, parts: Iterator[Part], spare: Callable[[], Batches | None]
    ) -> Iterator[Part]:
        """The parts as they are."""
        return parts


class SameData:
    """All workers should read the same batches, but only asking shows whether they do."""

    may_add_steps = False

    def __init__(self, layout: InputLayout) -> None:
        self._exchange = _Exchange(layout, width=2)

    def __call__(
        self, parts: Iterator[Part], spare: Callable[[], Batches | None]
    ) -> Iterator[Part]:
        """Raises ValueError on all workers where their batches differ."""
        step = 0
        while True:
            part = self._exchange.attempt(lambda: next(parts, None))
            if part is None:
                answers = self._exchange.tell(_DONE)
            else:
                answers = self._exchange.tell(_MORE, sum(part.examples), part.token)
            if any(answer != answers[0] for answer in answers):
                counts = ", ".join(f"{a[1]} on worker {worker}" for worker, a in enumerate(answers))
                raise ValueError(
                    f"the workers read different data in step {step} since their iteration began: "
                    f"{counts} examples; expected the same examples in the same order on all (use "
                    "seeded samplers, or AutoShardPolicy.OFF where each worker has its own data)"
                )
            if part is None:
                return
            step += 1
            yield part


class OwnData:
    """Each worker reads its own data, and may have less of it than others."""

    may_add_steps = True

    def __init__(self, layout: InputLayout) -> None:
        self._none = (0,) * len(layout.local_replicas)
        self._exchange = _Exchange(layout, width=len(self._none))

    def __call__(
        self, parts: Iterator[Part], spare: Callable[[], Batches | None]
    ) -> Iterator[Part]:
        """A worker that is done takes steps with batches of size zero until all are."""
        exchange = self._exchange
        empty: Batches | None = None
        while True:
            part = exchange.attempt(lambda: next(parts, None))
            if empty is None:
                empty = exchange.attempt(spare) if part is None else _emptied(part)
            if part is not None:
                answers = exchange.tell(_MORE, *part.sizes)
            else:
                answers = exchange.tell(_NOTHING if empty is None else _DONE)
            if all(answer[0] != _MORE for answer in answers):
                return
            without = [worker for worker, answer in enumerate(answers) if answer[0] == _NOTHING]
            if without or empty is None:
                raise ValueError(
                    f"the data of workers {without} is empty while others have some: they cannot "
                    "know how a batch of size zero looks; give every worker at least one example"
                )
            examples = tuple(size for answer in answers for size in answer[1:])
            if part is not None:
                yield Part(part.batches, part.sizes, examples)
            else:
                yield Part(empty, self._none, examples)


class _Exchange:
    """Messages of a state and `width` numbers; a worker's failure becomes everyone's error."""

    def __init__(self, layout: InputLayout, width: int) -> None:
        self._layout = layout
        self._width = width

    def attempt(self, read: Callable[[], T]) -> T:
        """Read; if that fails, tell the others, who would wait for this worker."""
        try:
            return read()
        except Exception:
            self._layout.all_gather_ints((_FAILED, *(0,) * self._width))
            raise

    def tell(self, state: int, *numbers: int) -> list[list[int]]:
        """Everyone's state and numbers (zeros where none are given)."""
        message = (state, *(numbers or (0,) * self._width))
        answers = [list(answer) for answer in self._layout.all_gather_ints(message)]
        failed = tuple(worker for worker, answer in enumerate(answers) if answer[0] == _FAILED)
        if failed:
            raise FastdistError(
                f"workers {list(failed)} could not read their data; the error that each of them "
                "raised says why",
                ranks=failed,
            )
        return answers


def _emptied(part: Part) -> Batches:
    pairs = zip(part.batches, part.sizes, strict=True)
    return tuple(emptied(batch, size) for batch, size in pairs)
