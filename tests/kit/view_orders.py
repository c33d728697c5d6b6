"""Orders for tests of stores of views: an entity, views of it, and logs of its changes.

A `Log` has the changes of a partition, with duplicates, conflicts, gaps and unreadable records
where a test needs them; :func:`random_logs` makes such logs from a seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from random import Random
from typing import Annotated, Any, Final
from uuid import UUID, uuid5

import pyarrow as pa
from pydantic import BaseModel, Field

from everstate.changes import Change as EncodedChange
from everstate.changes import ChangeCodec, EntityType, Kind, Provenance
from everstate.views.definition import ViewDefinition
from everstate.views.kinds import HistoryPlan, ViewPlan
from everstate.views.plan import compile_view
from everstate.views.tables import KeptTable, planned_column

START = datetime(2026, 1, 1, tzinfo=UTC)
TELLER = Provenance(api_version="v1", service_name="desk", identifier="teller")


class ViewedOrder(BaseModel):
    """The entity of the contract."""

    order_id: str
    region: str | None = None
    amount: Annotated[Decimal, Field(max_digits=12, decimal_places=2)] | None = None
    quantity: int | None = None
    status: str = "open"


ORDER = EntityType("order", ViewedOrder, "order_id")

VIEWS: tuple[ViewPlan, ...] = tuple(
    compile_view(ViewDefinition(name, sql), {"order": ORDER})
    for name, sql in {
        "by_region": "SELECT region, count(*) AS orders, sum(amount) AS total, "
        "avg(quantity) AS quantity, count(quantity) AS counted FROM order "
        "WHERE status <> 'void' GROUP BY region",
        "totals": "SELECT count(*) AS orders, sum(quantity) AS quantity FROM order",
        "open_orders": "SELECT region, amount FROM order WHERE status = 'open'",
    }.items()
)

TABLES: dict[str, KeptTable] = {plan.name: plan.table(1) for plan in VIEWS}
HISTORY = HistoryPlan.of(ORDER.name).table(1)

OrderState = dict[str, Any]
_AMOUNT = pa.decimal128(12, 2)
TYPES: dict[str, dict[str, pa.DataType]] = {
    "by_region": {
        "g0": pa.string(),
        "a0": _AMOUNT,
        "a1": pa.int32(),
        "a2": pa.int64(),
        "a3": pa.int32(),
    },
    "totals": {"a0": pa.int64(), "a1": pa.int32()},
    "open_orders": {"c0": pa.string(), "c1": _AMOUNT},
}


@dataclass(frozen=True)
class Logged:
    """A record of a partition; with a ``reason`` it is unreadable."""

    key: str
    version: int
    change_id: str
    kind: str
    occurred_at: datetime
    original: OrderState | None
    current: OrderState | None
    reason: str | None = None


@dataclass
class Log:
    """One partition's records; a missing offset is a marker or an aborted record."""

    records: dict[int, Logged] = field(default_factory=dict)
    end: int = 0

    def append(self, record: Logged) -> int:
        """Add a record; returns its offset."""
        self.records[self.end] = record
        self.end += 1
        return self.end - 1

    def skip(self, offsets: int = 1) -> None:
        """Leave out offsets, as transaction markers do."""
        self.end += offsets

    def between(self, start: int, end: int) -> pa.Table:
        """The planned changes of a range, as the pipeline passes them to a task."""
        chosen = [(o, r) for o, r in sorted(self.records.items()) if start <= o < end]
        return planned(chosen)


def history(
    key: str, states: Sequence[OrderState | None], hours: Sequence[int] = ()
) -> list[Logged]:
    """Changes that give an order these states in turn; ``None`` deletes it."""
    found: list[Logged] = []
    before: OrderState | None = None
    for version, state in enumerate(states, start=1):
        kind = "deleted" if state is None else "created" if before is None else "updated"
        hour = hours[version - 1] if hours else version
        change_id = str(uuid5(UUID(int=0), f"{key}/{version}"))
        moment = START + timedelta(hours=hour)
        found.append(Logged(key, version, change_id, kind, moment, before, state))
        before = state
    return found


def state_text(state: OrderState) -> str:
    """The JSON text of a state, as a message has it."""
    return _text_of(tuple(state.items()))


@lru_cache(maxsize=4096)
def _text_of(fields: tuple[tuple[str, Any], ...]) -> str:
    return ViewedOrder(**dict(fields)).model_dump_json()


def state_of(key: str, **fields: Any) -> OrderState:
    """An order's state; other fields have the model's defaults."""
    return ViewedOrder(order_id=key, **fields).model_dump()


_STRUCTS = {
    "by_region": pa.struct(list(TYPES["by_region"].items())),
    "totals": pa.struct(list(TYPES["totals"].items())),
    "open_orders": pa.struct(list(TYPES["open_orders"].items())),
}


def _image(view: str, state: OrderState | None) -> OrderState | None:
    """The view row that Spark would make from one state, computed in Python."""
    if state is None:
        return None
    amount, quantity = state["amount"], state["quantity"]
    if view == "totals":
        return {"a0": quantity, "a1": int(quantity is not None)}
    if view == "open_orders":
        if state["status"] != "open":
            return None
        return {"c0": state["region"], "c1": amount}
    if state["status"] == "void":
        return None
    return {
        "g0": state["region"],
        "a0": amount,
        "a1": int(amount is not None),
        "a2": quantity,
        "a3": int(quantity is not None),
    }


_MOMENT: Final = pa.timestamp("us", tz="UTC")
_HEADER: Final = pa.struct([("key", pa.string()), ("value", pa.binary())])
PLANNED: Final[Mapping[str, pa.DataType]] = {
    "offset": pa.int64(),
    "key": pa.string(),
    "raw_key": pa.binary(),
    "raw_value": pa.binary(),
    "raw_headers": pa.list_(_HEADER),
    "reason": pa.string(),
    "version": pa.int64(),
    "id": pa.string(),
    "kind": pa.string(),
    "occurred_at": _MOMENT,
    "recorded_at": _MOMENT,
    "schema_version": pa.int32(),
}
"""Columns of a change, before those of the views."""


def planned(records: Iterable[tuple[int, Logged]]) -> pa.Table:
    """Records in the form in which the pipeline passes them to the apply half."""
    rows = [_planned_row(offset, record) for offset, record in records]
    schema = list(PLANNED.items())
    for name, table in TABLES.items():
        for image in table.images:
            schema.append((planned_column(table, image), _STRUCTS[name]))
    return pa.Table.from_pylist(rows, schema=pa.schema(schema))


def _planned_row(offset: int, record: Logged) -> dict[str, Any]:
    raw = {
        "offset": offset,
        "raw_key": record.key.encode(),
        "raw_value": b"{",
        "raw_headers": [{"key": "ce_id", "value": record.change_id.encode()}],
        "reason": record.reason,
    }
    if record.reason is not None:
        return raw
    change: EncodedChange[OrderState] = EncodedChange(
        id=UUID(record.change_id),
        entity="order",
        schema_version=1,
        key=record.key,
        version=record.version,
        kind=Kind(record.kind),
        occurred_at=record.occurred_at,
        recorded_at=record.occurred_at + timedelta(minutes=1),
        provenance=TELLER,
        current=record.current,
        original=record.original,
    )
    raw |= {
        "raw_value": ChangeCodec(ORDER).encode(change)[1],
        "key": record.key,
        "version": record.version,
        "id": record.change_id,
        "kind": record.kind,
        "occurred_at": record.occurred_at,
        "recorded_at": change.recorded_at,
        "schema_version": 1,
    }
    return raw | images_of(record)


def images_of(record: Logged) -> dict[str, Any]:
    """The row deltas of a readable record, by their columns."""
    found = {}
    for name, table in TABLES.items():
        found[planned_column(table, "original")] = _image(name, record.original)
        found[planned_column(table, "current")] = _image(name, record.current)
    return found


def logged(*records: Logged) -> Log:
    """A log of these records."""
    log = Log()
    for record in records:
        log.append(record)
    return log


def orders(count: int, region: str = "north", versions: int = 1, *, prefix: str = "k") -> Log:
    """A log of ``count`` orders with some versions each, version by version."""
    names = [f"{prefix}{n:04}" for n in range(count)]
    stories = [
        history(name, [state_of(name, region=region, quantity=n)] * versions)
        for n, name in enumerate(names)
    ]
    return logged(*(story[version] for version in range(versions) for story in stories))


def random_logs(random: Random, partitions: int = 2, *, disorder: int = 5) -> list[Log]:
    """Partitions with random histories: deletes, re-creations, late reports.

    In each up to ``disorder`` duplicates, conflicts, versions out of order, gaps and unreadable
    records.
    """
    found = []
    for partition in range(partitions):
        stories = []
        for number in range(random.randint(1, 4)):
            key = f"p{partition}-{number}"
            states = _possible_states(random, key, random.randint(1, 6))
            stories.append(history(key, states, [random.randrange(10) for _ in states]))
        log = Log()
        for record in _woven(random, stories, disorder):
            log.append(record)
            log.skip(random.choice((0, 0, 1)))
        found.append(log)
    return found


def _possible_states(random: Random, key: str, count: int) -> list[OrderState | None]:
    """States of a possible history: no deletion without an existing entity."""
    states: list[OrderState | None] = []
    for _ in range(count):
        if states and states[-1] is not None and random.random() < 0.2:
            states.append(None)
            continue
        cents = random.choice((None, 0, random.randint(-(10**11), 10**11)))
        states.append(
            state_of(
                key,
                region=random.choice((None, "north", "south", "\"odd, \\ 'name\n")),
                amount=None if cents is None else Decimal(cents) / 100,
                quantity=random.choice((None, random.randint(-5, 5), 2**40)),
                status=random.choice(("open", "paid", "void")),
            )
        )
    return states


def _woven(random: Random, stories: list[list[Logged]], disorder: int) -> list[Logged]:
    """Histories interleaved at random, with up to ``disorder`` irregularities."""
    records: list[Logged] = []
    rest = [list(story) for story in stories if story]
    while rest:
        story = random.choice(rest)
        records.append(story.pop(0))
        rest = [story for story in rest if story]
    for _ in range(random.randint(0, disorder)):
        if not records:
            break
        place, to = random.randrange(len(records)), random.randint(0, len(records))
        record = records[place]
        what = random.choice(("again", "conflict", "move", "lose", "unreadable"))
        if what == "again":
            records.insert(to, record)
        elif what == "conflict":
            other = str(uuid5(UUID(record.change_id), "other"))
            records.insert(to, replace(record, change_id=other))
        elif what == "unreadable":
            records.insert(to, replace(record, reason="malformed"))
        else:
            records.pop(place)
            if what == "move":
                records.insert(min(to, len(records)), record)
    return records
