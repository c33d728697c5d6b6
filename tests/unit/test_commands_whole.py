"""A handler decides nothing on a log that has lost records, without servers (C8)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import command_cases as bank
from everstate.errors import LogTruncated
from everstate.log.positions import Ends
from everstate.log.record import Record
from everstate.log.topics import TopicNames
from everstate.sources.commands.deciding import NOTHING, Decider
from everstate.sources.commands.restoring import Restorer, _state_rows
from everstate.sources.commands.store import open_store

NAMES = TopicNames("bank")
CHANGES, STATE = NAMES.changes(bank.ENTITY), NAMES.state(bank.ENTITY)


class Log:
    """Partition 0 of `.changes` and `.state`, with holes of markers between their records."""

    def __init__(self) -> None:
        self.records: dict[str, list[Record]] = {CHANGES: [], STATE: []}
        self.begin = 0

    def add(self, topic: str, key: bytes, value: bytes) -> None:
        at = 3 * len(self.records[topic])
        self.records[topic].append(Record(topic, 0, at, 0, key, value, ()))

    def beginnings(self, topics: Iterable[str]) -> Ends:
        return {(topic, 0): self.begin if topic == CHANGES else 0 for topic in topics}

    def read(self, topic: str, _partition: int, start: int, end: int) -> Iterator[Record]:
        return iter([each for each in self.records[topic] if start <= each.offset < end])

    @property
    def ends(self) -> dict[str, int]:
        return {topic: 3 * len(records) for topic, records in self.records.items()}


def deposits(log: Log, key: str, count: int) -> None:
    """An account is opened and gets deposits; `.state` gets the newest change of two."""
    decider, held = Decider(bank.GROUP, message_bytes_max=1_048_576), NOTHING
    for number in range(count):
        asked = bank.Deposit(amount=1) if number else bank.Open(account_id=key, owner="Eva")
        decided = decider.decide(held, bank.sent(asked, key=key), bank.NOW)
        ((_, value, _),), held = decided.changes, decided.held
        log.add(CHANGES, key.encode(), value)
        if number % 2 or number == count - 1:
            log.add(STATE, key.encode(), value)


@pytest.fixture
def log() -> Log:
    made = Log()
    for key, count in (("a1", 4), ("a2", 1), ("a3", 7)):
        deposits(made, key, count)
    return made


def check(log: Log, folder: Path) -> None:
    store = open_store(folder / "0", "f", {})
    store.copy.write(dict(row for record in log.records[STATE] for row in _state_rows(record)))
    restorer = object.__new__(Restorer)
    restorer._names = NAMES
    restorer._offsets = restorer._consumer = log  # type: ignore[assignment]
    try:
        restorer._check_whole(store, bank.ENTITY, 0, log.ends)
    finally:
        store.close()


def test_a_whole_log_is_whole(log: Log, tmp_path: Path) -> None:
    check(log, tmp_path)
    check(Log(), tmp_path)


@pytest.mark.parametrize("lost", [1, 3, 8, 12])
def test_a_changelog_without_its_end_is_refused(log: Log, tmp_path: Path, lost: int) -> None:
    del log.records[CHANGES][-lost:]
    with pytest.raises(LogTruncated, match=r"state.g1 has 'a3' at version 7, and .* has not"):
        check(log, tmp_path)


def test_states_without_their_end_are_refused(log: Log, tmp_path: Path) -> None:
    del log.records[STATE][-2:]
    with pytest.raises(LogTruncated, match=r"has 'a3' at version 5, and .* has version 4"):
        check(log, tmp_path)


def test_a_log_that_was_replayed_without_its_states_is_refused(log: Log, tmp_path: Path) -> None:
    """Otherwise accounts that are open would be opened again, at version 1."""
    log.records[STATE].clear()
    with pytest.raises(LogTruncated, match=r"'a1' at version 1, and .* has version 0") as raised:
        check(log, tmp_path)
    assert "everstate log begin" in (raised.value.advice or "")


def test_changes_that_the_retention_dropped_are_no_loss(log: Log, tmp_path: Path) -> None:
    log.begin = log.ends[CHANGES]
    check(log, tmp_path)


def test_a_state_that_cannot_be_read_stops_no_handler(log: Log, tmp_path: Path) -> None:
    log.add(STATE, b"a1", b"{")
    check(log, tmp_path)
