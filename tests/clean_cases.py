"""A pretended database, the messages that capturing tools would make of it, and a checker."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from everstate.changes import EntityType, Kind
from everstate.config import Config, load
from everstate.declarations.captures import Capture, CaptureForm, Table
from everstate.log.record import OutRecord
from everstate.sources.cdc.balance import Cut, NumberedBatch, counted, held_rows
from everstate.sources.cdc.columns import Rows, Slices
from everstate.sources.cdc.composing import CaptureComposer
from everstate.sources.cdc.holding import HeldEntity
from everstate.sources.cdc.numbering import Numbering
from everstate.sources.cdc.reading import RawReader
from everstate.sources.cdc.states import States

CONFIG = load(Path(__file__).parent)
_RECORDED_S = datetime(2026, 11, 26, tzinfo=UTC).timestamp()
UNAVAILABLE = "__debezium_unavailable_value"
COLUMNS = ("name", "amount", "note")


class Person(BaseModel):
    """Somebody with a boss, whose row comes before theirs."""

    id: int
    boss_id: int


class Item(BaseModel):
    """The entity of these tests."""

    id: int
    name: str
    amount: int | None
    note: str | None


ITEM = EntityType("item", Item, "id")
DSN = "postgresql://nobody@localhost/shop"
"""Of a database that nobody connects to: the capture is ours, with one raw log."""


def capture_of(form: CaptureForm, **options: Any) -> Capture:
    """A capture of one table of items."""
    table = Table(entity="item", key_columns=("id",), **options.pop("table", {}))
    if options.get("dsn"):
        # As the pretended database writes what it does not tell.
        options["settings"] = {"unavailable.value.placeholder": UNAVAILABLE}
    kind = options.pop("kind", "postgresql" if form == "debezium" else "other")
    return Capture(
        name="shop", kind=kind, form=form, tables={"public.item": table},
        **{"transactions": False, **options},
    )  # fmt: skip


@dataclass
class Database:
    """One table, its log of messages in a form, and every state that each row ever had."""

    form: str
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    log: list[tuple[dict[str, Any], dict[str, Any] | None]] = field(default_factory=list)
    """Key and value of each message."""
    history: dict[int, list[dict[str, Any] | None]] = field(
        default_factory=lambda: defaultdict(list)
    )
    place: int = 100

    def write(self, key: int, values: Mapping[str, Any] | None) -> None:
        """Insert, update or (``None``) delete a row; nothing happens where nothing changes."""
        before = self.rows.get(key)
        if values is None and before is None:
            return
        after = None if values is None else {"id": key, **(before or _EMPTY), **values}
        if after == before:
            return
        self.place += 10
        if after is None:
            del self.rows[key]
        else:
            self.rows[key] = after
        self.history[key].append(after)
        self.log.append(({"id": key}, _MESSAGES[self.form](self, before, after)))

    def truncate(self) -> None:
        """Delete all rows, of which the log has one record."""
        self.place += 10
        for key in self.rows:
            self.history[key].append(None)
        self.rows.clear()
        source: dict[str, Any] = {"connector": "postgresql", "snapshot": "false", "txId": 1}
        source |= {"schema": "public", "table": "item", "lsn": self.place}
        source |= {"sequence": f'[null,"{self.place}"]'}
        self.log.append(({}, {"op": "t", "before": None, "after": None, "source": source}))

    def read(self, key: int, snapshot: str = "incremental") -> None:
        """A row read by a snapshot, as Debezium gives it; an incremental one has no place."""
        if key in self.rows:
            lsn = None if snapshot == "incremental" else self.place
            source = {"connector": "postgresql", "snapshot": snapshot, "lsn": lsn}
            source |= {"schema": "public", "table": "item"}
            value = {"op": "r", "before": None, "after": self.rows[key], "source": source}
            self.log.append(({"id": key}, value))


_EMPTY = {"name": "", "amount": None, "note": None}
_Row = dict[str, Any] | None


def _debezium(database: Database, before: _Row, after: _Row, *, full: bool) -> dict[str, Any]:
    op = "c" if before is None else "d" if after is None else "u"
    shown = after
    if not full:
        if after is not None and before is not None and after["note"] == before["note"]:
            shown = {**after, "note": UNAVAILABLE}
        if op == "d":
            assert before is not None
            # What PostgreSQL's default identity gives of a delete: lies, all but the key.
            before = {"id": before["id"], "name": "", "amount": None, "note": None}
        else:
            before = None
    source = {
        "connector": "postgresql", "snapshot": "false", "schema": "public", "table": "item",
        "lsn": database.place, "txId": 1, "sequence": f'[null,"{database.place}"]',
    }  # fmt: skip
    return {"op": op, "before": before, "after": shown, "source": source, "ts_ms": database.place}


def _maxwell(database: Database, before: _Row, after: _Row) -> dict[str, Any]:
    kind = "insert" if before is None else "delete" if after is None else "update"
    message: dict[str, Any] = {
        "database": "shop", "table": "item", "type": kind, "ts": database.place,
        "xid": 1, "position": f"bin.000001:{database.place}", "data": after or before,
    }  # fmt: skip
    if before is not None and after is not None:
        message["old"] = {c: before[c] for c in COLUMNS if before[c] != after[c]}
    return message


def _canal(database: Database, before: _Row, after: _Row) -> dict[str, Any]:
    kind = "INSERT" if before is None else "DELETE" if after is None else "UPDATE"
    data, old = after or before, None
    if before is not None and after is not None:
        changed = [c for c in COLUMNS if before[c] != after[c]]
        data = {"id": after["id"], **{c: after[c] for c in changed}}
        old = [{c: before[c] for c in changed}]
    return {
        "id": database.place, "table": "item", "type": kind, "isDdl": False, "pkNames": ["id"],
        "es": database.place, "data": [data], "old": old,
    }  # fmt: skip


def _goldengate(database: Database, before: _Row, after: _Row) -> dict[str, Any]:
    message: dict[str, Any] = {
        "table": "SHOP.ITEM", "pos": f"{database.place:020}", "primary_keys": ["id"],
        "op_ts": "2026-11-21 10:00:00.000000",
        "op_type": "I" if before is None else "D" if after is None else "U",
    }  # fmt: skip
    if before is not None and after is not None:
        changed = ["id", *(c for c in COLUMNS if before[c] != after[c])]
        message["before"] = {c: before[c] for c in changed}
        message["after"] = {c: after[c] for c in changed}
    else:
        message["before"], message["after"] = before, after
    return message


_MESSAGES: dict[str, Any] = {
    "debezium, full": lambda d, b, a: _debezium(d, b, a, full=True),
    "debezium, default": lambda d, b, a: _debezium(d, b, a, full=False),
    "maxwell": _maxwell,
    "canal": _canal,
    "goldengate": _goldengate,
}
FORMS = tuple(_MESSAGES)


class MemoryCopy:
    """What a StateCopy has, in memory."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}

    def get(self, name: bytes) -> bytes | None:
        return self.rows.get(name)

    def get_many(self, names: Iterable[bytes]) -> list[bytes | None]:
        return [self.rows.get(name) for name in names]

    def scan(self, prefix: bytes, start: bytes = b"") -> list[tuple[bytes, bytes]]:
        return sorted(
            one for one in self.rows.items() if one[0].startswith(prefix) and one[0] >= start
        )

    def settle(self, rows: Mapping[bytes, bytes | None]) -> None:
        for name, row in rows.items():
            if row is None:
                self.rows.pop(name, None)
            else:
                self.rows[name] = row


@dataclass(frozen=True)
class Made:
    """One change as it goes to the log."""

    entity: str
    key: str
    version: int
    kind: Kind
    current: bytes | None
    original: bytes | None
    value: Mapping[str, Any]
    """The whole message."""

    @classmethod
    def of(cls, record: OutRecord) -> Made:
        return cls.of_message(json.loads(record.value or b""))

    @classmethod
    def of_message(cls, value: Mapping[str, Any]) -> Made:
        states = [value["currentEntityState"], value["originalEntityState"]]
        current, original = (None if one is None else json.dumps(one).encode() for one in states)
        kind = Kind(value["kind"])
        key, version = value["key"], value["version"]
        return cls(value["entity"], key, version, kind, current, original, value)


class Numbered:
    """Rows become changes, batch by batch, as cleaning has it done."""

    def __init__(
        self, reader: RawReader, config: Config, *, restarts: bool = True, **options: Any
    ) -> None:
        """``restarts``: each batch is that of a new process."""
        self.reader, self.options, self.restarts = reader, options, restarts
        self.numbering: Numbering | None = None
        self.copy: Any = MemoryCopy()
        self.held: dict[tuple[str, str], HeldEntity] = {}
        self.composer = CaptureComposer(config, reader.capture, reader.entities)
        self.changes: list[Made] = []
        self.batches: list[NumberedBatch] = []
        self.offset = 0

    def read(self, *records: tuple[str, bytes | None, bytes | None], **more: Any) -> Rows:
        """Columns of records: last part of their topic's name, key and value."""
        names = [name for name, _, _ in records] or [""]
        tables = {name: number for number, name in enumerate(self.reader.capture.tables)}
        listed = []
        headers = more.get("headers", (None,) * len(self.reader.header_names))
        for number, (_, key, value) in enumerate(records):
            listed.append((number, self.offset, key, value, headers, 0))
            self.offset += 1
        rows = Rows.of(Slices(self.reader, names, tables).begin().columns(listed))
        rows.part = [0] * len(rows)
        rows.index, rows.block = [None] * len(rows), [None] * len(rows)
        return rows

    def run(
        self, rows: Rows, now_s: float = 0.0, cut: Cut | None = None, **options: Any
    ) -> NumberedBatch:
        """One batch of rows; its changes are added to :attr:`changes`."""
        states = States(self.copy)
        # The times in the messages are before it.
        self.composer.begin(max(now_s, _RECORDED_S))
        if self.numbering is None or self.restarts:
            given = {**self.options, **options}
            self.numbering = Numbering(self.reader, self.composer, self.held, **given)
        waiting = held_rows(self.held.values())
        batch = self.numbering.run(rows, [("raw", 0)], states, now_s, cut)
        read = batch.read + waiting
        counts = counted({}, read, batch.added, batch.outcomes, held_rows(self.held.values()))
        assert {table: one.vanished for table, one in counts.items() if one.vanished} == {}
        for entity in batch.held_changed & self.held.keys():
            # What is held comes back as it was.
            self.held[entity] = HeldEntity.decode(self.held[entity].encode())
        self.copy.settle(states.rows())
        topics = {way.changes for way in self.composer.targets}
        made = [Made.of(one) for one in self.composer.records() if one.topic in topics]
        self.changes += made
        self.batches.append(batch)
        return batch


class Cleaner(Numbered):
    """Runs messages of one table of items through reading and numbering."""

    def __init__(self, capture: Capture, **options: Any) -> None:
        super().__init__(RawReader(capture, {"item": ITEM}), CONFIG, **options)

    def take(
        self, log: Iterable[tuple[dict[str, Any], dict[str, Any] | None]], now_s: float = 0.0
    ) -> NumberedBatch:
        """One batch of messages."""
        encoded = [
            (
                "item",
                json.dumps(key).encode(),
                None if value is None else json.dumps(value).encode(),
            )
            for key, value in log
        ]
        return self.run(self.read(*encoded), now_s)


def broken_laws(
    changes: Iterable[Any],
    history: Mapping[int, list[_Row]],
    *,
    is_whole: bool = True,
    may_repeat: bool = False,
) -> list[str]:
    """What is wrong with these changes: versions, chain, and states that never were.

    ``is_whole``: every state that a row had is there. Else they are some of them, in order.
    ``may_repeat``: an earlier piece of the states may come again, up to the last one.
    """
    broken = []
    by_key: dict[str, list[Any]] = defaultdict(list)
    for change in changes:
        by_key[change.key].append(change)
    for key, listed in by_key.items():
        if [one.version for one in listed] != list(range(1, len(listed) + 1)):
            broken.append(f"{key}: versions {[one.version for one in listed]}")
        state = None
        for one in listed:
            step = one
            if step.original != state:
                broken.append(f"{key} version {one.version}: the chain is broken")
            kind = Kind.DELETED if step.current is None else Kind.CREATED
            if step.current is not None and step.original is not None:
                kind = Kind.UPDATED
            if step.kind is not kind:
                broken.append(f"{key} version {one.version}: it is no {step.kind}")
            state = step.current
        found = [None if one.current is None else json.loads(one.current) for one in listed]
        wanted = list(history.get(int(key), []))
        if is_whole and may_repeat:
            if found[-1:] != wanted[-1:] or not _is_subsequence(wanted, found):
                broken.append(f"{key}: {found} do not have all of {wanted} and end as they do")
        elif is_whole and found != wanted:
            broken.append(f"{key}: {found} instead of {wanted}")
        if not is_whole and not _is_subsequence(found, wanted):
            broken.append(f"{key}: {found} are not all of {wanted}, in order")
    if is_whole:
        missing = [key for key in history if str(key) not in by_key]
        broken += [f"{key}: it is missing" for key in missing]
    return broken


def _is_subsequence(found: list[_Row], wanted: list[_Row]) -> bool:
    rest = iter(wanted)
    return all(any(one == other for other in rest) for one in found)
