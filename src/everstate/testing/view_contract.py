"""What every store of views promises, with an oracle of its own that knows no SQL and no sums.

A store's test class inherits `ViewContract` and gives the fixture ``store``. `Log` lays changes
of orders into partitions, with duplicates, conflicts, gaps and unreadable records where a test
wants them; `expected` says, one record after the other, what the views must then hold.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Protocol
from uuid import UUID, uuid5

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from everstate.changes import Change as EncodedChange
from everstate.changes import ChangeCodec, EntityType, Kind, Provenance
from everstate.views.definition import ViewDefinition
from everstate.views.plan import ViewPlan, compile_view
from everstate.views.tables import KeptTable, kept_table, planned_column

START = datetime(2026, 1, 1, tzinfo=UTC)
TELLER = Provenance(api_version="v1", service_name="desk", identifier="teller")


class Order(BaseModel):
    """The entity of the contract."""

    order_id: str
    region: str | None = None
    amount: Annotated[Decimal, Field(max_digits=12, decimal_places=2)] | None = None
    quantity: int | None = None
    status: str = "open"


ORDER = EntityType("order", Order, "order_id")

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

TABLES: dict[str, KeptTable] = {plan.name: kept_table(plan, 1) for plan in VIEWS}

State = dict[str, Any]
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
    """A record of a partition; ``reason`` makes it one that cannot be read."""

    key: str
    version: int
    change_id: str
    kind: str
    occurred_at: datetime
    original: State | None
    current: State | None
    reason: str | None = None


@dataclass
class Log:
    """One partition's records; an offset that is not here is a marker or an aborted record."""

    records: dict[int, Logged] = field(default_factory=dict)
    end: int = 0

    def append(self, record: Logged) -> int:
        """Add a record; its offset."""
        self.records[self.end] = record
        self.end += 1
        return self.end - 1

    def skip(self, offsets: int = 1) -> None:
        """Leave offsets that are never served."""
        self.end += offsets

    def between(self, start: int, end: int) -> pa.Table:
        """What the pipeline gives a task: the planned changes of a range."""
        chosen = [(o, r) for o, r in sorted(self.records.items()) if start <= o < end]
        return planned(chosen)


def history(key: str, states: Sequence[State | None], hours: Sequence[int] = ()) -> list[Logged]:
    """Changes that take an order through some states; ``None`` deletes it."""
    found: list[Logged] = []
    before: State | None = None
    for version, state in enumerate(states, start=1):
        kind = "deleted" if state is None else "created" if before is None else "updated"
        hour = hours[version - 1] if hours else version
        change_id = str(uuid5(UUID(int=0), f"{key}/{version}"))
        moment = START + timedelta(hours=hour)
        found.append(Logged(key, version, change_id, kind, moment, before, state))
        before = state
    return found


def state_of(key: str, **fields: Any) -> State:
    """An order's state; fields that are not given are the model's."""
    return Order(order_id=key, **fields).model_dump()


_STRUCTS = {
    "by_region": pa.struct(list(TYPES["by_region"].items())),
    "totals": pa.struct(list(TYPES["totals"].items())),
    "open_orders": pa.struct(list(TYPES["open_orders"].items())),
}


def _image(view: str, state: State | None) -> State | None:
    """What Spark makes of one image, by hand."""
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


def planned(records: Iterable[tuple[int, Logged]]) -> pa.Table:
    """Records as the pipeline hands them to the apply half."""
    chosen = list(records)
    rows = [_planned_row(offset, record) for offset, record in chosen]
    header = pa.struct([("key", pa.string()), ("value", pa.binary())])
    moment = pa.timestamp("us", tz="UTC")
    schema: list[tuple[str, pa.DataType]] = [
        ("offset", pa.int64()),
        ("key", pa.string()),
        ("raw_key", pa.binary()),
        ("raw_value", pa.binary()),
        ("raw_headers", pa.list_(header)),
        ("reason", pa.string()),
        ("version", pa.int64()),
        ("id", pa.string()),
        ("kind", pa.string()),
        ("occurred_at", moment),
        ("recorded_at", moment),
        ("schema_version", pa.int32()),
    ]
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
    change: EncodedChange[State] = EncodedChange(
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
    for name, table in TABLES.items():
        raw[planned_column(table, "original")] = _image(name, record.original)
        raw[planned_column(table, "current")] = _image(name, record.current)
    return raw


Row = tuple[Any, ...]


@dataclass
class Tables:
    """What readers must see, and the account of all records (law 7)."""

    latest: list[Row]
    history: list[Row]
    by_region: list[Row]
    totals: list[Row]
    open_orders: list[Row]
    applied: int
    duplicate: int
    held: int
    dead: int


class _Account:
    """Follows the laws one record after the other."""

    def __init__(self) -> None:
        self.versions: dict[str, list[Logged]] = defaultdict(list)
        self.waiting: dict[str, dict[int, Logged]] = defaultdict(dict)
        self.duplicate = self.dead = 0

    def take(self, record: Logged) -> None:
        if record.reason is not None:
            self.dead += 1
            return
        done, waiting = self.versions[record.key], self.waiting[record.key]
        known = done[record.version - 1] if record.version <= len(done) else None
        known = known or waiting.get(record.version)
        if known is not None:
            same = known.change_id == record.change_id
            self.duplicate += same
            self.dead += not same
            return
        waiting[record.version] = record
        while len(done) + 1 in waiting:
            done.append(waiting.pop(len(done) + 1))


def expected(logs: Iterable[Log]) -> Tables:
    """What the views must hold after all records of some partitions."""
    account = _Account()
    for log in logs:
        for _, record in sorted(log.records.items()):
            account.take(record)
    alive = [done[-1].current for done in account.versions.values() if done]
    orders = [state for state in alive if state is not None]
    latest, older = [], []
    for key, done in account.versions.items():
        as_of = START
        for change in done:
            as_of = max(as_of, change.occurred_at)
            older.append((key, change.version, change.kind, as_of, _text(change.current)))
        if done:
            latest.append((key, len(done), done[-1].kind, as_of, _text(done[-1].current)))
    regions: dict[str | None, list[State]] = defaultdict(list)
    for state in orders:
        if state["status"] != "void":
            regions[state["region"]].append(state)
    by_region = []
    for region, states in regions.items():
        quantities = [s["quantity"] for s in states if s["quantity"] is not None]
        average = Decimal(sum(quantities)) / len(quantities) if quantities else None
        total = _sum(s["amount"] for s in states)
        by_region.append((region, len(states), total, _rounded(average), len(quantities)))
    return Tables(
        latest=_sorted(latest),
        history=_sorted(older),
        by_region=_sorted(by_region),
        totals=[(len(orders), _sum(s["quantity"] for s in orders))],
        open_orders=_sorted(
            (s["region"], s["amount"], s["order_id"]) for s in orders if s["status"] == "open"
        ),
        applied=len(older),
        duplicate=account.duplicate,
        held=sum(map(len, account.waiting.values())),
        dead=account.dead,
    )


def _sum(values: Iterable[Any]) -> Any:
    present = [value for value in values if value is not None]
    return sum(present) if present else None


def _rounded(value: Decimal | None) -> Decimal | None:
    return None if value is None else round(value, 8)


def _text(state: State | None) -> Any:
    return None if state is None else json.loads(Order(**state).model_dump_json())


def _sorted(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=repr)


class ViewStore(Protocol):
    """What the contract asks of a store under test."""

    def reset(self, partitions: int) -> None:
        """Begin again with empty views at offset 0 of some partitions."""

    def apply(self, partition: int, start: int, end: int, changes: pa.Table) -> object:
        """Let the core judge a range, with all views riding."""

    def query(self, select: str) -> list[Row]:
        """Rows of a query over the readers' names, and ``counters``."""


def observed(store: ViewStore) -> Tables:
    """What readers of a store see."""
    rounded = "region, orders, total, round(quantity, 8), counted"
    seen = "key, version, kind, as_of, state"
    counted = "sum(applied)::int, sum(duplicate)::int, sum(held)::int, sum(dead)::int"
    account = store.query(f"SELECT {counted} FROM counters WHERE entity = 'order'")[0]
    return Tables(
        _sorted(store.query(f"SELECT {seen} FROM order_latest")),
        _sorted(store.query(f"SELECT {seen} FROM order_history")),
        _sorted(store.query(f"SELECT {rounded} FROM by_region")),
        store.query("SELECT orders, quantity FROM totals"),
        _sorted(store.query("SELECT region, amount, _key FROM open_orders")),
        *account,
    )


def differences(found: Tables, wanted: Tables) -> dict[str, tuple[Any, Any]]:
    """Fields of two sets of tables that are not equal; empty when all are."""
    left, right = vars(found), vars(wanted)
    return {name: (left[name], right[name]) for name in left if left[name] != right[name]}


def check(store: ViewStore, logs: Iterable[Log]) -> None:
    """Raise AssertionError with what differs between the views and the oracle."""
    wrong = differences(observed(store), expected(logs))
    assert not wrong, wrong


_AMOUNTS = st.none() | st.integers(-(10**11), 10**11).map(lambda n: Decimal(n) / 100)
_STATES = st.none() | st.fixed_dictionaries(
    {
        "region": st.sampled_from([None, "north", "south", "\"odd, \\ 'name\n"]),
        "amount": _AMOUNTS,
        "quantity": st.none() | st.integers(-5, 2**40),
        "status": st.sampled_from(["open", "paid", "void"]),
    }
)


@st.composite
def logs(draw: st.DrawFn, partitions: int = 2, disorder: bool = True) -> list[Log]:
    """Partitions with random histories: deletes, re-creations, late reports.

    With ``disorder`` also duplicates, conflicts, versions out of order, gaps and unreadable
    records.
    """
    found = []
    for partition in range(partitions):
        stories = []
        for number in range(draw(st.integers(1, 4))):
            key = f"p{partition}-{number}"
            given_states = draw(st.lists(_STATES, min_size=1, max_size=6))
            states = _told(key, given_states)
            hours = draw(st.lists(st.integers(0, 9), min_size=6, max_size=6))
            stories.append(history(key, states, hours))
        records = _shuffled(draw, stories, disorder)
        log = Log()
        for record in records:
            log.append(record)
            log.skip(draw(st.sampled_from([0, 0, 1])))
        found.append(log)
    return found


def _told(key: str, states: Sequence[Mapping[str, Any] | None]) -> list[State | None]:
    """States of a history that can happen: nothing is deleted twice, or before it is there."""
    told: list[State | None] = []
    for fields in states:
        if fields is None and (not told or told[-1] is None):
            continue
        told.append(None if fields is None else state_of(key, **fields))
    return told


def _shuffled(draw: st.DrawFn, stories: list[list[Logged]], disorder: bool) -> list[Logged]:
    """Stories woven into each other, with whatever disorder is wanted."""
    records: list[Logged] = []
    rest = [list(story) for story in stories if story]
    while rest:
        story = rest[draw(st.integers(0, len(rest) - 1))]
        records.append(story.pop(0))
        rest = [story for story in rest if story]
    for _ in range(draw(st.integers(0, 5)) if disorder else 0):
        if not records:
            break
        place = draw(st.integers(0, len(records) - 1))
        record, to = records[place], draw(st.integers(0, len(records)))
        what = draw(st.sampled_from(["again", "conflict", "move", "lose", "unreadable"]))
        if what == "again":
            records.insert(to, record)
        elif what == "conflict":
            other = str(uuid5(UUID(record.change_id), "other"))
            records.insert(to, _but(record, change_id=other))
        elif what == "unreadable":
            records.insert(to, _but(record, reason="malformed"))
        else:
            records.pop(place)
            if what == "move":
                records.insert(min(to, len(records)), record)
    return records


def _but(record: Logged, **fields: Any) -> Logged:
    return Logged(**{**vars(record), **fields})


class ViewContract:
    """What every store of views promises; give the fixture ``store``."""

    @given(data=st.data())
    @settings(
        max_examples=25,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    def test_law_2_and_6_any_log_in_any_ranges_gives_the_tables_of_the_oracle(
        self, store: ViewStore, data: st.DataObject
    ) -> None:
        """Ranges are cut anywhere, delivered again, and overlap what was applied before."""
        partitions = data.draw(logs())
        store.reset(len(partitions))
        for number, log in enumerate(partitions):
            position = 0
            while position < log.end:
                end = data.draw(st.integers(position + 1, log.end))
                start = data.draw(st.integers(0, position))
                store.apply(number, start, end, log.between(start, end))
                position = end
        check(store, partitions)

    def test_applying_a_range_twice_changes_nothing(self, store: ViewStore) -> None:
        """A position drops what is read twice."""
        store.reset(1)
        log = Log()
        for record in history("a", [state_of("a", region="north", quantity=3), None]):
            log.append(record)
        for _ in range(3):
            store.apply(0, 0, log.end, log.between(0, log.end))
        check(store, [log])
