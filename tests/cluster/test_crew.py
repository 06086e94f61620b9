"""The processes of a job that keeps its number of ranks, on machines that are lists here."""

from __future__ import annotations

from typing import Any

import pytest
from fastdist.cluster import crew
from fastdist.cluster.crew import Crew, Spare


class Machine:
    """Starts what the crew says, and remembers it."""

    def __init__(self, crew: Crew, ranks: int, cores: int) -> None:
        self.slots: list[int] = []
        self.ended = 0
        self.slot_of: dict[int, int] = {}
        self._crew = crew
        self._cores = cores
        for slot in range(ranks):
            self.add(slot)

    def add(self, slot: int) -> None:
        number = len(self.slot_of)
        self.slot_of[number] = slot
        self._crew.add(Spare(self, number, slot, self._cores))

    def send(self, number: int, message: dict[str, Any]) -> None:
        if "start" in message:
            self.slots.append(self.slot_of[number])
        else:
            self.ended += 1

    def kill(self, number: int) -> None:
        raise AssertionError


def test_ranks_are_shared_out_by_cores(capfd: pytest.CaptureFixture[str]) -> None:
    made = Crew(6, 2)
    small = Machine(made, 6, cores=2)
    made.fill(False)
    assert small.slots == []  # waits for the other machine
    large = Machine(made, 6, cores=4)
    made.fill(False)
    assert (small.slots, large.slots) == ([0, 1], [0, 1, 2, 3])
    said = capfd.readouterr().err
    assert "6 ranks: " in said
    assert "faster" not in said


def test_a_lost_machines_ranks_are_taken_over(capfd: pytest.CaptureFixture[str]) -> None:
    made = Crew(4, 3)
    machines = [Machine(made, 4, cores=2) for _ in range(3)]
    made.fill(False)
    assert sorted(len(machine.slots) for machine in machines) == [1, 1, 2]
    lost = machines[0]
    made.lose_machine(lost)
    made.fill(False)
    assert [len(machine.slots) for machine in machines[1:]] == [2, 2]
    back = Machine(made, 4, cores=2)
    made.fill(False)
    assert back.slots == []  # in reserve
    made.lose_machine(machines[1])
    made.fill(False)
    assert (len(machines[2].slots), len(back.slots)) == (2, 2)
    made.fill(True)
    assert (machines[2].ended, back.ended) == (2, 2)


def test_a_rank_that_has_ended_is_a_spare_again() -> None:
    made = Crew(2, 1)
    machine = Machine(made, 2, cores=1)
    made.fill(False)
    made.lose(machine, 0, -1)  # becomes the program, and hangs up
    made.fill(False)
    assert machine.slots == [0, 1]
    made.lose(machine, 7, 1)  # the rank in slot 1, as it had joined
    made.fill(False)
    assert machine.slots == [0, 1]
    machine.add(1)
    made.fill(False)
    assert machine.slots == [0, 1, 1]


def test_without_all_machines_it_begins_later(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Crew(2, 2)
    machine = Machine(made, 2, cores=1)
    made.fill(False)
    assert made.waits_until_s is not None
    assert machine.slots == []
    monkeypatch.setattr(crew.time, "monotonic", lambda: made.waits_until_s)
    made.fill(False)
    assert machine.slots == [0, 1]
    assert made.waits_until_s is None
