"""A pretended database, the messages that capturing tools would make of it, and a checker."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from everstate.changes import EntityType, Kind
from everstate.sources.cdc.balance import counted, held_rows
from everstate.sources.cdc.declaration import Capture, Form, Table
from everstate.sources.cdc.holding import HeldEntity
from everstate.sources.cdc.local_state import LocalState
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.reading import RawReader, RefusedRow
from everstate.sources.cdc.versioning import Batch, RawPlace, Versioned, Versioner

UNAVAILABLE = "__debezium_unavailable_value"
COLUMNS = ("name", "amount", "note")


class Item(BaseModel):
    """The entity of these tests."""

    id: int
    name: str
    amount: int | None
    note: str | None


ITEM = EntityType("item", Item, "id")


def capture_of(form: Form, **options: Any) -> Capture:
    """A capture of one table of items."""
    table = Table(entity="item", key_columns=("id",), **options.pop("table", {}))
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

    def read(self, key: int) -> None:
        """A row read by an incremental snapshot, as Debezium gives it: without a place."""
        if key in self.rows:
            source = {"connector": "postgresql", "snapshot": "incremental", "lsn": None}
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
    source = {"connector": "postgresql", "snapshot": "false", "lsn": database.place, "txId": 1}
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


class Cleaner:
    """Runs messages through reading and versioning in batches, as the pipeline does."""

    def __init__(self, capture: Capture, path: Path = Path(":memory:")) -> None:
        self.reader = RawReader(capture, {"item": ITEM})
        self.state = LocalState(path)
        self.held: dict[tuple[str, str], HeldEntity] = {}
        self.changes: list[Versioned] = []
        self.batches: list[Batch] = []
        self._offset = 0

    def take(
        self, log: Iterable[tuple[dict[str, Any], dict[str, Any] | None]], now_s: float = 0.0
    ) -> Batch:
        """One batch of messages."""
        rows: list[tuple[RawPlace, CleanRow | RefusedRow]] = []
        for key, value in log:
            encoded = None if value is None else json.dumps(value).encode()
            place = RawPlace("raw", 0, self._offset)
            self._offset += 1
            for one in self.reader.read("item", json.dumps(key).encode(), encoded):
                assert isinstance(one, CleanRow | RefusedRow)
                rows.append((place, one))
        waiting = held_rows(self.held.values())
        batch = Versioner(self.reader, self.state, self.held).run(rows, now_s)
        assert unaccounted(rows, batch, waiting, self.held) == {}
        held = {e: self.held[e].encode() if e in self.held else None for e in batch.held_changed}
        self.state.commit(batch.touched, held, {})
        self.changes += batch.changes
        self.batches.append(batch)
        return batch


def unaccounted(
    rows: Iterable[tuple[RawPlace, CleanRow | RefusedRow]],
    batch: Batch,
    before: Counter[str],
    held: Mapping[tuple[str, str], HeldEntity],
) -> dict[str, int]:
    """Rows of a batch that nothing became of, by table; ``before``: what waited then."""
    read = Counter(row.table for _, row in rows) + batch.made + before
    counts = counted({}, read, batch.outcomes, held_rows(held.values()))
    return {table: one.vanished for table, one in counts.items() if one.vanished}


def broken_laws(
    changes: Iterable[Versioned],
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
    by_key: dict[str, list[Versioned]] = defaultdict(list)
    for change in changes:
        by_key[change.key].append(change)
    for key, listed in by_key.items():
        if [one.version for one in listed] != list(range(1, len(listed) + 1)):
            broken.append(f"{key}: versions {[one.version for one in listed]}")
        state = None
        for one in listed:
            step = one.step
            if step.original != state:
                broken.append(f"{key} version {one.version}: the chain is broken")
            kind = Kind.DELETED if step.current is None else Kind.CREATED
            if step.current is not None and step.original is not None:
                kind = Kind.UPDATED
            if step.kind is not kind:
                broken.append(f"{key} version {one.version}: it is no {step.kind}")
            state = step.current
        found = [
            None if one.step.current is None else json.loads(one.step.current) for one in listed
        ]
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
