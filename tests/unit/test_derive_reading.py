"""Accepted changes of a log as they are read: any history, any ranges of the core and of ours."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstate.errors import ArchiveError, DataLoss
from everstate.log.positions import Range
from everstate.log.record import Record
from everstate.pipeline.derive import reading
from everstate.pipeline.derive.reading import READ_MAX, AcceptedReader
from everstate.views.control import Control
from everstate.views.control.verdicts import packed
from everstate.views.core import apply_range
from everstate.views.kinds import HistoryPlan
from everstate.views.source import RecordSource, Run
from everstate.views.tables import CORE_FINGERPRINT, HISTORY_FINGERPRINT, Core
from everstate.views.trailing import Exceptions
from kit.view_memory import (
    MemoryDatabase,
    MemoryStore,
    MemoryTransaction,
    exceptions_in,
)
from kit.view_orders import Log, Logged, planned, random_logs
from kit.waiting import until

HISTORY = HistoryPlan.of("order").table(1)
CORE = Core("order", "orders", (HISTORY,), ids=HISTORY)


class Source(RecordSource):
    """Gives the records of some partitions a few at a time; counts what is fetched."""

    def __init__(self, logs: list[Log], random: Random) -> None:
        self._logs, self._random = logs, random
        self._at = dict.fromkeys(range(len(logs)), 0)
        self.fetched = 0
        self.is_in_snapshot = False

    def begin(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> None:
        self._at = dict(starts)

    def poll(self, wait_s: float, only: Iterable[int], most: int = READ_MAX) -> list[Run]:
        runs = []
        for partition in only:
            log, start = self._logs[partition], self._at[partition]
            end = min(log.end, start + self._random.randint(0, 4))
            offsets = [offset for offset in sorted(log.records) if start <= offset < end]
            runs.append(Run(partition, start, end, self._records(partition, offsets)))
            self._at[partition] = end
        return runs

    def fetch(self, partition: int, offsets: Iterable[int]) -> list[Record]:
        assert not self.is_in_snapshot, "a fetch from the archive may take seconds"
        wanted = list(offsets)
        self.fetched += len(wanted)
        return self._records(partition, wanted)

    def _records(self, partition: int, offsets: Iterable[int]) -> list[Record]:
        records = self._logs[partition].records
        return [_record(partition, offset, records[offset]) for offset in offsets]

    def close(self) -> None:
        """Nothing to give up."""


def _record(partition: int, offset: int, record: Logged) -> Record:
    value = planned([(offset, record)])["raw_value"][0].as_py()
    return Record("orders", partition, offset, 0, record.key.encode(), value, ())


class Notes(Control):
    """The exceptions that a core in memory recorded, and the bytes that were not trimmed."""

    def __init__(self, store: MemoryStore, logs: list[Log], below: Mapping[int, int]) -> None:
        """``below``: the bytes of what was released before these offsets are trimmed."""
        self._database, self._logs, self._below = store.database, logs, below

    def exceptions(self, core: Core, partition: int, start: int, end: int) -> Exceptions:
        found = self._found(partition, start, end)
        # As the tables are asked: of this range only.
        return replace(
            found,
            dead=frozenset(o for o in found.dead if start <= o < end),
            held=frozenset(o for o in found.held if start <= o < end),
        )

    def _found(self, partition: int, start: int, end: int) -> Exceptions:
        return exceptions_in(MemoryTransaction(self._database), partition, start, end)

    def trimmed(self, core: Core, partition: int, start: int, end: int) -> set[int]:
        released = self._found(partition, end, self._below[partition]).released
        return {offset for offset in released if start <= offset < end}

    def released_changes(
        self, core: Core, partition: int, start: int, end: int, *, known: Collection[int] = ()
    ) -> list[tuple[int, bytes, bytes]]:
        found = []
        for offset, by in sorted(self._found(partition, start, end).released.items()):
            if offset < start and offset not in known:
                assert by >= self._below[partition], "its bytes are nowhere"
                record = _record(partition, offset, self._logs[partition].records[offset])
                assert record.key is not None
                assert record.value is not None
                found.append((offset, record.key, record.value))
        return found


def accepted(logs: list[Log]) -> dict[str, list[str]]:
    """By key, the ids of versions from 1 without a hole, each first in the log: a plain fold."""
    versions: dict[str, dict[int, str]] = defaultdict(dict)
    for log in logs:
        for _, record in sorted(log.records.items()):
            if record.reason is None:
                versions[record.key].setdefault(record.version, record.change_id)
    found = {}
    for key, ids in versions.items():
        end = next(n for n in range(1, len(ids) + 2) if n not in ids)
        if end > 1:
            found[key] = [ids[n] for n in range(1, end)]
    return found


def gathered(reader: AcceptedReader) -> None:
    """Let it read once, as the first time."""
    reading = reader.read_on()
    if reading is not None:
        wait([reading], 30)
    reader.gather()


def read(
    logs: list[Log],
    random: Random,
    notes: type[Notes] = Notes,
    source: Source | None = None,
    *,
    is_trimmed: bool = True,
    restarts: float = 0.0,
) -> dict[str, list[str]]:
    """Judge and read by turns, in ranges cut anywhere; the ids that were taken, by key.

    ``restarts``: how often the reader is killed and begins where it was.
    """
    source = source or Source(logs, random)
    store = MemoryStore(MemoryDatabase())
    judged = dict.fromkeys(range(len(logs)), 0)
    for partition in judged:
        places = store.database.table("position")
        places["order_latest", 1, partition] = (0, CORE_FINGERPRINT)
        places["order_history", 1, partition] = (0, HISTORY_FINGERPRINT)

    def judge() -> None:
        for partition, log in enumerate(logs):
            if judged[partition] < log.end and random.random() < 0.6:
                end = random.randint(judged[partition] + 1, log.end)
                span = Range(judged[partition], end)
                apply_range(store, CORE, partition, span, log.between(span.start, end))
                judged[partition] = end

    judge()  # before the version begins, whose position then keeps bytes from being trimmed
    below = dict(judged) if is_trimmed else dict.fromkeys(judged, 0)
    control = notes(store, logs, below)

    def begun(vector: Mapping[int, int]) -> AcceptedReader:
        trimmed = {part: control.trimmed(CORE, part, 0, at) for part, at in vector.items()}
        return AcceptedReader(source, vector, trimmed)

    reader = begun(dict.fromkeys(judged, 0))
    ends = {partition: log.end for partition, log in enumerate(logs)}
    found: dict[str, list[str]] = defaultdict(list)
    while reader.vector != ends:
        judge()
        gathered(reader)
        most, source.is_in_snapshot = random.randint(1, 5), True
        taken = reader.take(control, CORE, judged, most)
        source.is_in_snapshot = False
        for _, message in taken:
            found[message.key].append(message.id)
        if random.random() < restarts:
            reader = begun(reader.vector)
    return dict(found)


@given(seed=st.integers(0, 2**32), restarts=st.sampled_from([0.0, 0.3]))
@settings(max_examples=150, deadline=None)
def test_what_is_read_is_what_was_accepted_each_once_and_in_order(
    seed: int, restarts: float
) -> None:
    """With duplicates, conflicts, gaps, unreadable records and offsets that are never served."""
    random = Random(seed)
    logs = random_logs(random)
    assert read(logs, random, restarts=restarts) == accepted(logs)


@pytest.mark.parametrize(("is_trimmed", "restarts"), [(True, 0.0), (False, 0.3), (True, 0.3)])
def test_only_a_restart_fetches_held_changes_and_only_those_without_bytes(
    is_trimmed: bool, restarts: float
) -> None:
    """A fetch may take many seconds, and an archive that was begun anew has not all of them."""
    fetched = 0
    for seed in range(60):
        logs = random_logs(random := Random(seed))
        source = Source(logs, random)
        given: Any = {"is_trimmed": is_trimmed, "restarts": restarts}
        assert read(logs, random, Notes, source, **given) == accepted(logs)
        fetched += source.fetched
    assert bool(fetched) == (is_trimmed and restarts > 0)


class Big(Source):
    """Gives as many records as are wanted, each of 100,000 bytes."""

    def poll(self, wait_s: float, only: Iterable[int], most: int = READ_MAX) -> list[Run]:
        start = self._at[0]
        self._at[0] = end = start + min(most, 300)
        value = bytes(100_000)
        records = [Record("orders", 0, at, 0, b"k", value, ()) for at in range(start, end)]
        return [Run(0, start, end, records)]


def test_what_waits_is_bounded_by_its_bytes_and_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Big([Log({}, 0)], Random(0))
    reader = AcceptedReader(source, {0: 0}, {})
    for _ in range(100):
        gathered(reader)
    assert reader.waiting * 100_000 < (64 << 20) + 300 * 100_000
    monkeypatch.setattr(reading, "_WAITING_BYTES", 1 << 40)
    for _ in range(100):
        gathered(reader)
    assert reader.waiting == READ_MAX


class Forgetful(Notes):
    """Planted: applies what waited at its own offset, and not where it was released."""

    def exceptions(self, core: Core, partition: int, start: int, end: int) -> Exceptions:
        found = super().exceptions(core, partition, start, end)
        return replace(found, held=frozenset(), released={})


class Blind(Notes):
    """Planted: does not see duplicates."""

    def exceptions(self, core: Core, partition: int, start: int, end: int) -> Exceptions:
        return replace(super().exceptions(core, partition, start, end), duplicates=())


def test_planted_readers_that_do_not_follow_the_core_are_caught() -> None:
    for planted in (Forgetful, Blind):
        logs = ((random_logs(random := Random(seed)), random) for seed in range(200))
        assert any(read(log, random, planted) != accepted(log) for log, random in logs), planted


def test_a_build_that_begins_again_goes_on_with_its_progress() -> None:
    source = Source([Log({}, 0)], Random(0))
    assert AcceptedReader(source, {0: 30, 1: 20}, {}).progress({0: 60, 1: 40}).share == 0.5
    assert AcceptedReader(source, {0: 0, 1: 0}, {}).progress({0: 0, 1: 0}).share == 0.0


class Slow(Source):
    """Sorts an archive before its first record is there."""

    def __init__(self) -> None:
        super().__init__([Log({}, 0)], Random(0))
        self.is_sorted, self.closed_after = threading.Event(), list[bool]()
        self.error: Exception | None = None

    def poll(self, wait_s: float, only: Iterable[int], most: int = READ_MAX) -> list[Run]:
        assert self.is_sorted.wait(30)
        if self.error is not None:
            raise self.error
        return [Run(0, 0, 1, [Record("orders", 0, 0, 0, b"k", b"v", ())])]

    def close(self) -> None:
        self.closed_after.append(self.is_sorted.is_set())


def slow() -> tuple[Slow, AcceptedReader, Future[list[Run]]]:
    """A reader that has begun to sort."""
    source = Slow()
    reader = AcceptedReader(source, {0: 0}, {})
    gathered(reader)
    reading = reader.read_on()
    assert reading is not None
    return source, reader, reading


def test_an_archive_that_is_sorted_is_not_waited_for() -> None:
    source, reader, reading = slow()
    reader.gather()
    assert reader.read_on() is reading
    assert (reader.waiting, reader.read) == (0, {0: 0})
    source.is_sorted.set()
    wait([reading], 30)
    reader.gather()
    assert (reader.waiting, reader.read) == (1, {0: 1})


def test_a_failure_to_read_is_raised_where_it_is_gathered() -> None:
    source, reader, reading = slow()
    source.error = ArchiveError("a file of the archive is damaged")
    source.is_sorted.set()
    wait([reading], 30)
    with pytest.raises(ArchiveError):
        reader.gather()


def test_what_is_being_read_is_closed_when_it_was_read() -> None:
    source, reader, reading = slow()
    reader.close()
    assert source.closed_after == []
    source.is_sorted.set()
    wait([reading], 30)
    until(lambda: source.closed_after == [True])


class Trimmed(Control):
    """Two held changes were released: the bytes of the first one were trimmed."""

    def __init__(self) -> None:
        """No connection."""

    def run(self, query: Any, parameters: Any = ()) -> Any:
        change = pa.table({"key": ["k"], "raw_value": [b"v"]})
        return [(3, b""), (4, packed(change))]


def test_a_held_change_whose_bytes_were_trimmed_is_left_out_only_when_it_is_known() -> None:
    assert Trimmed().released_changes(CORE, 0, 5, 9, known={3}) == [(4, b"k", b"v")]
    with pytest.raises(DataLoss):
        Trimmed().released_changes(CORE, 0, 5, 9)
