"""When a record of a joined stream may be joined: never before the other history is far enough."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from everstate.pipeline.derive.joining import JoinGate


class Flights:
    """The other entity's log, how far its history is, and the stream's own log."""

    def __init__(self) -> None:
        self.end, self.kept = 0, 0
        self.own = {0: 0}

    def scans(self) -> Mapping[int, int]:
        return dict(self.own)

    def ends(self) -> Mapping[int, int]:
        return {0: self.end}

    @property
    def history(self) -> Mapping[int, int]:
        return {0: self.kept}


def test_a_record_that_is_read_while_another_waits_has_a_requirement_of_its_own() -> None:
    flights = Flights()
    gate = JoinGate(flights.scans, flights.ends)
    flights.end, flights.own = 10, {0: 1}
    gate.look({0: 1}, {0: 0})
    flights.end, flights.own = 11, {0: 2}
    gate.look({0: 2}, {0: 0})
    assert gate.upto({0: 9}) == {}
    assert gate.upto({0: 10}) == {0: 1}, "the second scan waits for the flight's update"
    gate.look({0: 2}, {0: 1})
    assert gate.upto({0: 10}) == {}
    assert gate.upto({0: 11}) == {0: 2}


def test_a_requirement_is_met_though_records_come_all_the_time() -> None:
    flights = Flights()
    gate = JoinGate(flights.scans, flights.ends)
    taken, longest = 0, 0
    for read in range(1, 200):
        # The history never has the log's end.
        flights.end, flights.kept, flights.own = flights.end + 5, flights.end, {0: read}
        gate.look({0: read}, {0: taken})
        taken = max(taken, gate.upto(flights.history).get(0, 0))
        longest = max(longest, read - taken)
    assert longest <= 3


def test_a_topic_without_records_to_join_asks_for_no_ends() -> None:
    def ends() -> Mapping[int, int]:
        raise AssertionError("no record was read")

    gate = JoinGate(ends, ends)
    gate.look({0: 7}, {0: 7})
    assert gate.upto({}) == {}


def test_what_the_log_had_before_waits_once() -> None:
    """A version that is built does not wait for the history with each part that it reads."""
    flights, waits = Flights(), 0
    flights.own = {0: 1_000_000}
    gate = JoinGate(flights.scans, flights.ends)
    taken = 0
    while taken < 1_000_000:
        # The history is always some steps behind.
        flights.end, flights.kept = flights.end + 100, flights.end - 200
        read = min(1_000_000, taken + 10_000)
        gate.look({0: read}, {0: taken})
        upto = min(read, gate.upto(flights.history).get(0, 0))
        waits += upto <= taken
        taken = max(taken, upto)
    assert waits <= 3


class Forgetful(JoinGate):
    """Planted: what comes while others wait is joined with them."""

    def look(self, read: Mapping[int, int], taken: Mapping[int, int]) -> None:
        super().look(read, taken)
        self._upto = self._own()


def joined_too_early(gate_type: type[JoinGate], seed: int) -> bool:
    """Any turns of writers, reader and history: whether a record was joined before its time."""
    random, flights = Random(seed), Flights()
    flights.own = written = {0: 0, 1: 0}
    gate = gate_type(flights.scans, flights.ends)
    read, taken = {0: 0, 1: 0}, {0: 0, 1: 0}
    needed: dict[tuple[int, int], int] = {}
    is_early = False
    for _ in range(60):
        turn = random.randrange(4)
        if turn == 0:
            flights.end += 1
        elif turn == 1:
            flights.kept = random.randint(flights.kept, flights.end)
        elif turn == 2:
            partition, more = random.randrange(2), random.randint(1, 3)
            start = written[partition]
            needed |= {(partition, at): flights.end for at in range(start, start + more)}
            written[partition] += more
        for partition, end in written.items():
            read[partition] = random.randint(read[partition], end)
        gate.look(read, taken)
        for partition, upto in gate.upto(flights.history).items():
            reached = random.randint(taken[partition], max(taken[partition], read[partition]))
            now = range(taken[partition], min(upto, reached))
            is_early |= any(needed[partition, at] > flights.kept for at in now)
            taken[partition] += len(now)
    return is_early


@given(seed=st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_no_record_is_joined_before_the_history_has_what_its_log_had(seed: int) -> None:
    assert not joined_too_early(JoinGate, seed)


def test_a_planted_gate_that_forgets_later_records_is_caught() -> None:
    assert any(joined_too_early(Forgetful, seed) for seed in range(50))
