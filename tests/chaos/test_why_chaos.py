"""Jobs that are brought to a standstill at random: `why` names the class, and never a wrong rank.

FASTDIST_CHAOS_WHY is the number of jobs, 24 if it is not set.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
from fastdist.recorder.occupation import Kind
from stalled import Stalled

COUNT = int(os.environ.get("FASTDIST_CHAOS_WHY", "24"))
# Kinds of stall that any rank may suffer: the class.
ONE_RANK = {
    "killed": Kind.DEAD,
    "raising": Kind.DEAD,
    "crashing": Kind.DEAD,
    "leaving": Kind.DEAD,
    "stopped": Kind.STOPPED,
    "asleep": Kind.USER,
    "spinning": Kind.USER,
    "late": Kind.USER,
    "timed_out": Kind.USER,
    "waiting_for_a_lock": Kind.THREADS,
    "without_the_gil": Kind.THREADS,
    "reading_a_pipe": Kind.FILES,
    "waiting_for_a_file_lock": Kind.FILES,
    "other_size": Kind.OTHER_CALL,
}
SEVERAL_RANKS = {"crossed": Kind.OTHER_ORDER, "all_killed": Kind.DEAD}
KINDS = ONE_RANK | SEVERAL_RANKS


@pytest.fixture
def stalled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stalled]:
    made = Stalled(tmp_path_factory.mktemp("records"))
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(COUNT))
def test_never_a_wrong_rank(stalled: Stalled, seed: int) -> None:
    draw = random.Random(seed)
    kind = draw.choice(sorted(KINDS))
    size = draw.randint(3 if kind == "other_size" else 2, 4)
    rank = draw.randrange(size)
    stalled.start(kind, size, rank, steps=draw.randint(20, 400))
    found = stalled.diagnosis(kind)
    assert found.kind is KINDS[kind], found.sentence
    if kind in ONE_RANK:
        assert found.ranks == (rank,), found.sentence
    elif kind == "all_killed":
        assert found.ranks == tuple(range(size)), found.sentence
