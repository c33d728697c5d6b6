"""Contract of all stores of rows with versions; a store's test class inherits `RowStoreContract`.

It provides the fixture ``kept``: a :class:`RowsKept` around the store under test. The core, the
positions and the oracle are in memory, so that a store's test needs only the server of that store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from random import Random
from typing import Any, ClassVar, Final
from uuid import UUID

import pyarrow as pa
import pytest

from everstate.errors import (
    BuildGivenUp,
    PositionMoved,
    Unavailable,
    ViewFailed,
    ViewRowsMissing,
)
from everstate.log.positions import Range
from everstate.views.core import apply_range
from everstate.views.definition import ViewDefinition
from everstate.views.kinds import ViewPlan
from everstate.views.plan import compile_view
from everstate.views.stores.store import ViewStore
from everstate.views.stores.versioned import VersionedStore
from everstate.views.tables import CORE_FINGERPRINT, Core, KeptTable, Row, planned_column
from everstate.views.trailing import trail_range
from kit.view_memory import MemoryDatabase, MemoryStore
from kit.view_memory_orders import LATEST, open_positions, vector_of
from kit.view_oracle import accepted, expected, in_order
from kit.view_orders import ORDER, TABLES, Log, history, logged, random_logs, state_of

ATTEMPT: Final = UUID(int=1)
_TYPES: Final = {"c0": pa.string(), "c1": pa.decimal128(12, 2)}
_STRUCT: Final = pa.struct(list(_TYPES.items()))
_SCHEMA: Final = pa.schema([("key", pa.string()), ("version", pa.int64()), *_TYPES.items()])
_SQL: Final = {
    "row": "SELECT region, amount FROM order WHERE status = 'open'",
    "append": "SELECT region, amount FROM order_changes WHERE status = 'open'",
}


class AttemptingMemory(MemoryStore):
    """The cores and the positions, in memory."""

    attempt = ATTEMPT

    @contextmanager
    def attempting(self, table: KeptTable, attempt: UUID) -> Iterator[None]:
        """Hold an attempt to build a version."""
        if attempt != self.attempt:
            raise BuildGivenUp(table.view, table.version)
        yield

    @contextmanager
    def writing(self, table: KeptTable, partition: int) -> Iterator[bool]:
        """Nobody else is there."""
        yield True


@dataclass
class RowsKept:
    """Open orders, and open changes of orders, in the store under test."""

    kept: ViewStore
    read: Callable[[str], list[Row] | None]
    """Rows that readers of a view see, as region, amount and key; ``None``: they see no view."""
    merge: str = "row"
    name: str = "tested"
    store_class: type[VersionedStore] = VersionedStore
    home: AttemptingMemory = field(default_factory=AttemptingMemory)
    types: ClassVar[Mapping[str, pa.DataType]] = _TYPES
    """Types of the columns that tasks write."""

    def __post_init__(self) -> None:
        made = compile_view(ViewDefinition("opened", _SQL[self.merge]), {"order": ORDER})
        self.plan: ViewPlan = replace(made, store=self.name, fingerprint="in another store")
        self.store = self.store_class(self.name, self.home, self.kept)
        self.reset()

    def reset(self) -> None:
        """Begin again: no version but the first, which is empty, at offset 0 of two partitions."""
        self.home.database = MemoryDatabase()
        open_positions(self.home.database, LATEST, 1, CORE_FINGERPRINT, range(2))
        for version in (1, 2):
            with suppress(ViewFailed):
                self.store.drop(self.plan.name, version)
        self.store.drop_reader(self.plan.name)
        self.install(1)

    def install(self, version: int, vector: Mapping[int, int] | None = None) -> None:
        """Create an empty version, with its positions."""
        self.store.install(self.plan, version, self.types)
        place = (self.plan.name, version, self.plan.fingerprint)
        open_positions(self.home.database, *place, range(2), vector)

    def table(self, version: int = 1) -> KeptTable:
        """The table of a version."""
        return self.plan.ruled_table(version)

    def planned(self, log: Log, start: int, end: int, version: int = 1) -> pa.Table:
        """The changes of a range, planned for a version."""
        changes, table = log.between(start, end), self.table(version)
        (image,) = table.images
        named = planned_column(table, image)
        if self.merge == "row":
            meant = planned_column(TABLES["open_orders"], "current")
            names = [named if name == meant else name for name in changes.column_names]
            return changes.rename_columns(names)
        of_range = [log.records[o].current for o in sorted(log.records) if start <= o < end]
        opened = [_opened(state) for state in of_range]
        return changes.append_column(named, pa.array(opened, _STRUCT))

    def judge(self, partition: int, log: Log, start: int, end: int) -> None:
        """Let the core judge a range."""
        core, span = Core("order", "orders"), Range(start, end)
        apply_range(self.home, core, partition, span, log.between(start, end))

    def trail(self, partition: int, log: Log, start: int, end: int, version: int = 1) -> None:
        """Let a version apply a range that the core has judged."""
        core, span = Core("order", "orders"), Range(start, end)
        # Changes that were held before the range are read again with it.
        changes = self.planned(log, 0, end, version)
        trail_range(self.store, core, self.table(version), partition, span, changes, meets=True)

    def keep(self, log: Log) -> None:
        """Let the core and the first version apply all that is left of a log in partition 0."""
        start = self.position()
        self.judge(0, log, start, log.end)
        self.trail(0, log, start, log.end)

    def load(self, records: Sequence[Any], version: int, attempt: UUID = ATTEMPT) -> None:
        """Fill a version with the result of a batch over accepted changes."""
        last = {record.key: record for record in records}
        chosen = last.values() if self.merge == "row" else records
        states = [(record, _opened(record.current)) for record in chosen]
        rows = [{"key": r.key, "version": r.version, **row} for r, row in states if row is not None]
        batch = pa.RecordBatch.from_pylist(rows, schema=_SCHEMA)
        list(self.store.loader(self.table(version), attempt)([batch]))

    def position(self, partition: int = 0, version: int = 1) -> int:
        """The position of a version."""
        return vector_of(self.home.database.rows, self.plan.name, version)[partition]

    def rows(self, version: int = 1) -> list[Row]:
        """Rows of a version as a proof reads them: key, version, region, amount."""
        batches = list(self.store.read(self.table(version), _SCHEMA))
        return in_order(tuple(r.values()) for each in batches for r in each.to_pylist())

    def wanted(self, *logs: Log, vector: Mapping[int, int] | None = None) -> list[Row]:
        """What these rows must be, from an oracle that has no versions and no batches."""
        until = {p: log.end for p, log in enumerate(logs)} if vector is None else vector
        changes = accepted(logs, until)
        if self.merge == "append":
            found = [(r.key, r.version, _opened(r.current)) for r in changes]
            return in_order((k, v, row["c0"], row["c1"]) for k, v, row in found if row is not None)
        versions = {record.key: record.version for record in changes}
        opened = expected(logs, until).open_orders
        return in_order((k, versions[k], region, amount) for region, amount, k in opened)

    def check(self, *logs: Log) -> None:
        """Raise AssertionError when the first version is not what it must be at its position."""
        vector = {p: self.position(p) for p in range(len(logs))}
        found, wanted = self.rows(), self.wanted(*logs, vector=vector)
        assert found == wanted, f"at {vector}: {found}, must be {wanted}"


def _opened(state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if state is None or state["status"] != "open":
        return None
    return {"c0": state["region"], "c1": state["amount"]}


def told(key: str, *regions: str | None) -> Log:
    """A log of one order that is in these regions in turn; ``None`` deletes it."""
    states = [None if r is None else state_of(key, region=r, amount=1) for r in regions]
    return logged(*history(key, states))


class RowStoreContract:
    """Contract of stores of rows with versions; provide the fixture ``kept``."""

    histories: ClassVar[int] = 10
    """How many random histories the first test uses."""

    def test_any_logs_in_any_ranges_give_the_rows_of_the_oracle(self, kept: RowsKept) -> None:
        """Ranges are cut anywhere, come again, and are lost between the rows and the position."""
        for seed in range(self.histories):
            random = Random(seed)
            logs = random_logs(random, 2, disorder=6)
            kept.reset()
            for partition, log in enumerate(logs):
                self._keep(kept, random, partition, log)
            try:
                kept.check(*logs)
            except AssertionError as wrong:
                raise AssertionError(f"seed {seed}: {wrong}") from wrong

    @staticmethod
    def _keep(kept: RowsKept, random: Random, partition: int, log: Log) -> None:
        kept.judge(partition, log, 0, log.end)
        while (position := kept.position(partition)) < log.end:
            start = random.choice((position, random.randint(0, position)))
            end = random.randint(start + 1, log.end)
            with suppress(PositionMoved):  # the task of a range that was applied comes again
                if random.random() < 0.3:
                    with _killed_at_commit(kept), suppress(Unavailable):
                        kept.trail(partition, log, start, end)
                else:
                    kept.trail(partition, log, start, end)

    def test_a_position_is_moved_after_the_rows(self, kept: RowsKept) -> None:
        """A kill in between writes the rows again; in the other order they would be lost."""
        log = told("a", "north", "south")
        kept.judge(0, log, 0, 2)
        with _killed_at_commit(kept), pytest.raises(Unavailable):
            kept.trail(0, log, 0, 2)
        assert kept.rows() == kept.wanted(log)
        assert kept.position() == 0
        real = type(kept.kept).write
        broken = type("Broken", (type(kept.kept),), {"write": _refuse})
        kept.kept.__class__ = broken
        try:
            with pytest.raises(ViewFailed, match="the store tested failed: OSError: full"):
                kept.trail(0, log, 0, 2)
        finally:
            kept.kept.__class__ = broken.__mro__[1]
        assert type(kept.kept).write is real
        assert kept.position() == 0
        kept.trail(0, log, 0, 2)
        kept.check(log)

    def test_a_row_that_is_deleted_or_left_the_view_is_gone(self, kept: RowsKept) -> None:
        log = logged(
            *history("a", [state_of("a", region="north"), None]),
            *history("b", [state_of("b", region="north"), state_of("b", status="paid")]),
            *history("c", [state_of("c", region="north")]),
        )
        kept.keep(log)
        kept.check(log)

    def test_an_older_write_never_wins(self, kept: RowsKept) -> None:
        """A task of a process that was given up may write long after the others."""
        log = told("a", "north", "south", "east")
        kept.keep(log)
        for late in (2, 1):
            kept.store.write(kept.table(), columns_of(("a", late, "old", Decimal(9))))
        kept.check(log)

    def test_a_deletion_stays_when_an_older_write_comes(self, kept: RowsKept) -> None:
        """A late one of a row, a late one of a deletion, and a new row of the same key."""
        if kept.merge != "row":
            return
        log = told("a", "north", "south", None)
        kept.keep(log)
        kept.store.write(kept.table(), columns_of(("a", 2, "south", Decimal(1))))
        kept.check(log)
        again = told("a", "north", "south", None, "west")
        kept.keep(again)
        kept.store.write(kept.table(), columns_of(("a", 3, None, None), present=False))
        kept.check(again)

    def test_a_deletion_of_a_key_that_the_store_never_had_is_kept_too(self, kept: RowsKept) -> None:
        """Its rows may be written later, by a task that was overtaken."""
        if kept.merge != "row":
            return
        kept.store.write(kept.table(), columns_of(("a", 2, None, None), present=False))
        kept.store.write(kept.table(), columns_of(("a", 1, "north", Decimal(1))))
        assert kept.rows() == []

    def test_an_entity_that_moves_to_another_key_leaves_nothing_behind(
        self, kept: RowsKept
    ) -> None:
        log = logged(*history("old", [state_of("old"), None]), *history("new", [state_of("new")]))
        kept.keep(log)
        kept.check(log)
        assert kept.merge != "row" or [key for key, *_ in kept.rows()] == ["new"]

    def test_values_come_back_as_they_were_written(self, kept: RowsKept) -> None:
        """Nulls, all digits of a decimal, and texts that a store may use itself."""
        odd = ("", " ", "null", "'\"\\\n\t;:{}[]", "é\u2028日本", "0", "x" * 5_000)
        amounts = (None, Decimal("-0.01"), Decimal("9999999999.99"), Decimal(0))
        columns: list[Row] = [
            (f"{text[:20]}/{n}", 1, text, amounts[n % len(amounts)]) for n, text in enumerate(odd)
        ]
        columns.append(("no region", 1, None, None))
        kept.store.write(kept.table(), columns_of(*columns))
        assert kept.rows() == in_order(columns)
        some = pa.schema([_SCHEMA.field(name) for name in ("c1", "key")])
        read = pa.Table.from_batches(kept.store.read(kept.table(), some), some)
        found = in_order(tuple(row.values()) for row in read.to_pylist())
        assert found == in_order((amount, key) for key, _, _, amount in columns)

    def test_a_version_is_built_beside_published_undone_and_dropped(self, kept: RowsKept) -> None:
        """Readers see one version as a whole, and each version is kept for itself."""
        name, log = kept.plan.name, told("a", "north", "south")
        assert kept.read(name) is None
        kept.judge(0, log, 0, 2)
        kept.trail(0, log, 0, 1)
        kept.store.show(kept.plan.name, 1)
        first = kept.read(name)
        assert first == _shown(kept.rows(1)) != []
        kept.install(2, {0: 2, 1: 0})
        kept.load(accepted([log], {0: 2}), 2)
        kept.load(accepted([log], {0: 2}), 2)  # a task that Spark ran twice
        assert kept.rows(2) == kept.wanted(log) != kept.rows(1)
        assert kept.read(name) == first
        with pytest.raises(BuildGivenUp):
            kept.load(accepted([log], {0: 2}), 2, UUID(int=2))
        kept.store.show(kept.plan.name, 2)
        assert kept.read(name) == _shown(kept.wanted(log))
        kept.store.show(kept.plan.name, 1)  # undone
        assert kept.read(name) == first
        kept.store.show(kept.plan.name, 2)
        for _ in range(2):
            kept.store.drop(name, 1)
        assert kept.read(name) == _shown(kept.wanted(log))
        later = told("a", "north", "south", "east")
        kept.judge(0, later, 2, 3)
        kept.trail(0, later, 2, 3, version=2)
        assert kept.read(name) == _shown(kept.wanted(later))
        for _ in range(2):
            kept.store.drop_reader(name)
        assert kept.read(name) is None

    def test_an_attempt_is_not_changed_by_late_calls_of_the_one_before(
        self, kept: RowsKept
    ) -> None:
        """A call that was given up may be carried out at any time later."""
        name, table = kept.plan.name, kept.table()
        first, second = (replace(kept.store, attempt=each) for each in ("0a", "0b"))
        first.install(kept.plan, 1, _TYPES)
        first.write(table, columns_of(("a", 5, "north", Decimal(1))))
        second.install(kept.plan, 1, _TYPES)
        lower = [("a", 1, "south", Decimal(2)), ("b", 1, "south", Decimal(2))]
        second.write(table, columns_of(*lower))
        first.write(table, columns_of(("gone", 9, "north", Decimal(1))))
        if kept.merge == "row":
            first.write(table, columns_of(("b", 9, None, None), present=False))
        second.show(name, 1)
        for _ in range(2):
            first.drop(name, 1)
        found = in_order(
            tuple(row.values()) for each in second.read(table, _SCHEMA) for row in each.to_pylist()
        )
        shown = kept.read(name)
        second.drop(name, 1)
        assert (found, shown) == (lower, _shown(lower))

    def test_a_table_that_is_not_there_takes_no_rows_and_is_not_published(
        self, kept: RowsKept
    ) -> None:
        """The store was emptied, or another one has its address: earlier rows would be missing."""
        name, log = kept.plan.name, told("a", "north", "south")
        kept.judge(0, log, 0, 2)
        kept.trail(0, log, 0, 1)
        kept.kept.drop(kept.table().name)
        for call in (
            lambda: kept.trail(0, log, 1, 2),
            lambda: kept.store.write(kept.table(), columns_of(("b", 1, None, None), present=False)),
            lambda: kept.rows(),
            lambda: kept.store.show(name, 1),
        ):
            with pytest.raises(ViewRowsMissing, match=f"everstate views rebuild {name}"):
                call()
        assert kept.position() == 1
        assert kept.read(name) is None
        kept.install(2, {0: 2, 1: 0})
        kept.load(accepted([log], {0: 2}), 2)
        kept.store.show(name, 2)
        assert kept.read(name) == _shown(kept.wanted(log))


def _refuse(*_given: object) -> None:
    raise OSError("full")


@contextmanager
def _killed_at_commit(kept: RowsKept) -> Iterator[None]:
    """Let the next transaction end after its rows were written, and before its position is."""

    def between(call: str) -> None:
        if call == "commit":
            raise Unavailable("killed")

    kept.home.between = between
    try:
        yield
    finally:
        kept.home.between = lambda _call: None


def columns_of(*rows: Row, present: bool | None = None) -> dict[str, pa.Array]:
    """Rows of key, version, region and amount in the columns of a version's table."""
    found = pa.Table.from_pylist([dict(zip(_SCHEMA.names, r, strict=True)) for r in rows], _SCHEMA)
    columns = {name: found[name] for name in found.column_names}
    return columns if present is None else {**columns, "present": pa.array([present] * len(rows))}


def _shown(rows: Sequence[Row]) -> list[Row]:
    return in_order((region, amount, key) for key, _, region, amount in rows)
