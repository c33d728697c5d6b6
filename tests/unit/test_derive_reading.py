"""Accepted changes of a log as they are read: any history, any ranges of the core and of ours."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from random import Random

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from everstate.log.positions import Range
from everstate.log.record import Record
from everstate.pipeline.derive.reading import AcceptedReader
from everstate.views.core import apply_range
from everstate.views.kinds import HistoryPlan
from everstate.views.tables import CORE_FINGERPRINT, HISTORY_FINGERPRINT, Core
from everstate.views.trailing import Exceptions
from kit.view_memory import (
    HeldChange,
    MemoryDatabase,
    MemoryStore,
    MemoryTransaction,
    exceptions_in,
)
from kit.view_orders import Log, Logged, planned, random_logs

HISTORY = HistoryPlan.of("order").table(1)
CORE = Core("order", "orders", (HISTORY,), ids=HISTORY)


class Follower:
    """Gives the records of some partitions a few at a time."""

    def __init__(self, logs: list[Log], random: Random) -> None:
        self._random = random
        self._left = [
            (partition, offset, record)
            for partition, log in enumerate(logs)
            for offset, record in sorted(log.records.items())
        ]
        self._ends = {partition: log.end for partition, log in enumerate(logs)}
        self._reported = dict.fromkeys(self._ends, 0)
        self._at = dict(self._reported)

    def poll(self, records_max: int, wait_s: float) -> list[Record]:
        count = min(records_max, self._random.randint(0, 4))
        given, self._left = self._left[:count], self._left[count:]
        found = [self._record(*each) for each in given]
        for record in found:
            self._at[record.partition] = record.offset + 1
        for partition, end in self._ends.items():
            if not any(p == partition for p, _, _ in self._left):
                self._at[partition] = end
        return found

    def _record(self, partition: int, offset: int, record: Logged) -> Record:
        value = planned([(offset, record)])["raw_value"][0].as_py()
        return Record("orders", partition, offset, 0, record.key.encode(), value, ())

    def spans(self) -> dict[tuple[str, int], tuple[int, int]]:
        found = {
            ("orders", p): (self._reported[p], at)
            for p, at in self._at.items()
            if at != self._reported[p]
        }
        self._reported = dict(self._at)
        return found

    def close(self) -> None:
        """Nothing to give up."""


class Notes:
    """The exceptions that a core in memory recorded."""

    def __init__(self, store: MemoryStore) -> None:
        self._database = store.database

    def exceptions(self, core: Core, partition: int, start: int, end: int) -> Exceptions:
        found = exceptions_in(MemoryTransaction(self._database), partition, start, end)
        # As the tables are asked: of this range only.
        return replace(
            found,
            dead=frozenset(o for o in found.dead if start <= o < end),
            held=frozenset(o for o in found.held if start <= o < end),
        )

    def released_changes(
        self, core: Core, partition: int, start: int, end: int
    ) -> list[tuple[int, bytes, bytes]]:
        held: list[HeldChange] = [
            row for (p, _, _), row in self._database.table("held").items() if p == partition
        ]
        return [
            (each.offset, each.change["key"][0].as_py().encode(), _value(each.change))
            for each in held
            if each.released_at is not None
            and start <= each.released_at < end
            and each.offset < start
        ]


def _value(change: pa.Table) -> bytes:
    found: bytes = change["raw_value"][0].as_py()
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


def read(logs: list[Log], random: Random, notes: type[Notes] = Notes) -> dict[str, list[str]]:
    """Judge and read by turns, in ranges cut anywhere; the ids that were taken, by key."""
    store = MemoryStore(MemoryDatabase())
    for partition in range(len(logs)):
        places = store.database.table("position")
        places["order_latest", 1, partition] = (0, CORE_FINGERPRINT)
        places["order_history", 1, partition] = (0, HISTORY_FINGERPRINT)
    reader = AcceptedReader(Follower(logs, random), dict.fromkeys(range(len(logs)), 0))
    judged = dict.fromkeys(range(len(logs)), 0)
    ends = {partition: log.end for partition, log in enumerate(logs)}
    found: dict[str, list[str]] = defaultdict(list)
    while reader.vector != ends:
        for partition, log in enumerate(logs):
            if judged[partition] < log.end and random.random() < 0.6:
                end = random.randint(judged[partition] + 1, log.end)
                span = Range(judged[partition], end)
                apply_range(store, CORE, partition, span, log.between(span.start, end))
                judged[partition] = end
        reader.poll(0.0)
        for partition, ready in reader.ready(judged).items():
            for change in reader.take(notes(store), CORE, {partition: ready}):
                found[change.message.key].append(change.message.id)
    return dict(found)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_what_is_read_is_what_was_accepted_each_once_and_in_order(seed: int) -> None:
    """With duplicates, conflicts, gaps, unreadable records and offsets that are never served."""
    random = Random(seed)
    logs = random_logs(random)
    assert read(logs, random) == accepted(logs)


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
