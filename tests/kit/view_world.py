"""The world of a simulation: a log, an archive, a database with views of orders, and its tasks."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from random import Random
from typing import Any, ClassVar, Final

import pyarrow as pa

from everstate.errors import PositionMoved, ViewFailed
from everstate.log.positions import Range
from everstate.views.batch import Batch
from everstate.views.control import BUILDING, KEPT, LIVE, RETIRED, ViewVersion
from everstate.views.core import apply_range
from everstate.views.kinds import HistoryPlan, ViewPlan
from everstate.views.tables import (
    CORE_FINGERPRINT,
    Core,
    Image,
    KeptTable,
    Vector,
    physical,
    planned_column,
    planned_columns,
)
from everstate.views.trailing import trail_range
from everstate.views.versions import registered, steps
from kit.view_actors import FOREIGN, MIRRORED, UNREAD, RepeatableReader, TwoStores, note
from kit.view_memory import MemoryDatabase, Opened
from kit.view_memory_orders import LATEST, advance, open_positions, vector_of
from kit.view_oracle import accepted
from kit.view_orders import PLANNED, TABLES, VIEWS, Log, random_logs

PARTITIONS: Final = range(2)
PLANS: Final[Mapping[str, ViewPlan]] = {p.name: p for p in (HistoryPlan.of("order"), *VIEWS)}
BASE: Final = -1
"""Shard number of the rows of a build."""

OLDER: Final = "/older"
"""Suffix of a fingerprint: an older application computes the view differently."""

KeptTables = Sequence[tuple[KeptTable, Vector]]
Application = frozenset[str] | None
"""Views that an application declares, each with one fingerprint; ``None``: all views, with any
fingerprint. With `OLDER` in the set it has other fingerprints."""


@lru_cache(maxsize=4096)
def _table(name: str, version: int, fingerprint: str) -> KeptTable:
    return replace(PLANS[name], fingerprint=fingerprint).table(version)


@lru_cache(maxsize=4096)
def _columns(tables: tuple[KeptTable, ...]) -> tuple[list[int], list[str]]:
    """Places of the columns of `TwoStores.light` for some tables, and their names there."""
    own = [name for name in PLANNED if name not in UNREAD]
    every = [*own, *(c for table in TABLES.values() for c in planned_columns(table))]
    places, names = list(range(len(own))), list(own)
    for table in tables:
        for image in table.images:
            meant = TABLES[MIRRORED.get(table.view, table.view)]
            source: Image = "current" if table.fingerprint.endswith(OLDER) else image
            places.append(every.index(planned_column(meant, source)))
            names.append(planned_column(table, image))
    return places, names


class World:
    """Log, archive, database, and the tasks that were planned and have not run."""

    store_class: ClassVar[type[TwoStores]] = TwoStores
    foreign: ClassVar[KeptTable] = FOREIGN
    killed_builds: ClassVar[float] = 0.15
    """Share of builds that are killed before they report that they are done."""

    def __init__(self, seed: int, logs: list[Log] | None = None) -> None:
        """``logs``: one for each of the two partitions; ``None``: made from the seed."""
        self.seed, self.random = seed, Random(seed)
        self.happened: Counter[str] = Counter()
        self.logs = logs or random_logs(self.random, len(PARTITIONS), disorder=8)
        places = [(p, offset) for p, log in enumerate(self.logs) for offset in log.records]
        self.unstorable = {
            place for place in places if logs is None and self.random.random() < 0.03
        }
        self.judged = [self._as_judged(p, log) for p, log in enumerate(self.logs)]
        """The logs as the core must judge them: changes that no table can hold are dead."""
        records = [record for log in self.judged for _, record in sorted(log.records.items())]
        self._row_of = {id(record): row for row, record in enumerate(records)}
        self.ends, self.archived, self.log_begins = ([0] * len(PARTITIONS) for _ in range(3))
        self.store = self.store_class()
        self._planned = [self.store.light(sorted(log.records.items())) for log in self.logs]
        self._whole = pa.concat_tables(self._planned)
        self._offsets = [changes["offset"].to_pylist() for changes in self._planned]
        self.store.refuses = self._refuses
        self.store.unstorable = lambda p, o: "refused" if (p, o) in self.unstorable else None
        self.failing: set[tuple[str, int, int]] = set()
        self.pending: list[Callable[[], None]] = []
        self.readers: list[RepeatableReader] = []
        self.declared = dict(PLANS)
        self.is_settling = False
        """Whether all disturbances have ended, so that the core takes all there is at once."""
        self._begin()

    @property
    def foreign_positions(self) -> MemoryDatabase:
        """The database with the positions of the view in another store."""
        return self.store.elsewhere

    def foreign_vector(self) -> dict[int, int]:
        """The positions of the view in another store."""
        return vector_of(self.foreign_positions.rows, self.foreign.view, self.foreign.version)

    @property
    def database(self) -> MemoryDatabase:
        """The database of the core."""
        return self.store.database

    def _as_judged(self, partition: int, log: Log) -> Log:
        records = {
            offset: replace(record, reason="refused")
            if (partition, offset) in self.unstorable and record.reason is None
            else record
            for offset, record in log.records.items()
        }
        return Log(records, log.end)

    def _begin(self) -> None:
        """Declare all views before any record is applied, so that they ride from the start."""
        open_positions(self.database, LATEST, 1, CORE_FINGERPRINT, PARTITIONS)
        for plan in PLANS.values():
            open_positions(self.database, plan.name, 1, plan.fingerprint, PARTITIONS)
            self.put(registered(plan, 1, published=True, built={}))
        place = (self.foreign.view, self.foreign.version, self.foreign.fingerprint)
        open_positions(self.foreign_positions, *place, PARTITIONS)

    # the registry

    def versions(self) -> list[ViewVersion]:
        """Versions of views, by name and number."""
        return [row for _, row in sorted(self.database.table("view").items())]

    def put(self, row: ViewVersion) -> None:
        """Register a version."""
        self.database.table("view")[row.name, row.version] = row
        numbers = self.database.table("number")
        numbers[row.name] = max(row.version, numbers.get(row.name, 0))

    def add(self, row: ViewVersion) -> None:
        """Register a new version, with a number that no version of the name ever had."""
        used = self.database.table("number").get(row.name, 0)
        assert row.version > used, f"version {row.version} of {row.name} is used twice"
        self.put(row)

    def numbers(self) -> dict[str, int]:
        """The highest version that each name ever had."""
        return dict(self.database.table("number"))

    def core_vector(self) -> dict[int, int]:
        """Positions of the core."""
        return vector_of(self.database.rows, LATEST, 1)

    def vector(self, row: ViewVersion) -> dict[int, int]:
        """Positions of a version."""
        return vector_of(self.database.rows, row.name, row.version)

    def close_positions(self, row: ViewVersion) -> None:
        """Delete a version's positions."""
        positions = self.database.table("position")
        for p in PARTITIONS:
            positions.pop((row.name, row.version, p), None)

    def forget(self, row: ViewVersion) -> None:
        """Drop a version: rows, positions, registry."""
        self.database.rows.pop(physical(row.name, row.version), None)
        self.close_positions(row)
        self.database.table("view").pop((row.name, row.version), None)
        for table in ("met", "attempt"):
            self.database.table(table).pop((row.name, row.version), None)

    def give_up(self, row: ViewVersion) -> None:
        """Cancel a version that is being built."""
        if row.published_at is None:
            self.forget(row)
        else:
            note(self.database, row, status=KEPT)
            self.database.table("met").pop((row.name, row.version), None)

    def take_steps(self) -> None:
        """Start the application: register versions of its declared views in one transaction."""
        rows = self.versions()
        standing = {(name, version) for name, version, _ in self.database.table("position")}
        found = steps(
            "order",
            self.declared.values(),
            rows,
            standing=standing,
            numbers=self.numbers(),
            on_change="rebuild",
        )
        for step in found:
            for version in step.superseded:
                self.give_up(self._row(step.name, version))
            row = self.database.table("view").get((step.name, step.version))
            if row is not None and step.declared is not None:
                if row.fingerprint == step.declared.fingerprint:
                    note(self.database, row, undone=None)
            if step.declared is None:
                if step.version and self._row(step.name, step.version).status == LIVE:
                    note(self.database, self._row(step.name, step.version), status=RETIRED)
            elif step.what == "returns":
                note(self.database, self._row(step.name, step.version), status=LIVE)
            elif step.what == "goes back":
                note(self.database, self._row(step.name, step.version), status=BUILDING)
            elif (step.name, step.version) in self.database.table("view"):
                if step.what == "changed":  # it waited
                    note(self.database, self._row(step.name, step.version), status=BUILDING)
            elif step.what in ("new", "changed"):
                self.add(registered(step.declared, step.version, status=BUILDING))
            self.happened[step.what] += 1

    def _row(self, name: str, version: int) -> ViewVersion:
        row: ViewVersion = self.database.table("view")[name, version]
        return row

    # what is read

    def kept(self, known: Application) -> list[tuple[KeptTable, Vector]]:
        """Versions that an application keeps, from one snapshot: those of views that it knows."""
        found: list[tuple[KeptTable, Vector]] = []
        for row in self.versions():
            older = OLDER if known is not None and OLDER in known else ""
            is_same = row.fingerprint == PLANS[row.name].fingerprint
            of_mine = known is None or bool(older) or (row.name in known and is_same)
            vector = self.vector(row)
            waits = row.status == BUILDING and row.built is None
            if of_mine and vector and row.status in (LIVE, BUILDING) and not waits:
                table = _table(row.name, row.version, row.fingerprint + older)
                found.append((table, vector))
        return found

    def span(self, partition: int, start: int, end: int, *, whole: bool = False) -> Range | None:
        """A range from ``start`` that log or archive has, cut at random unless ``whole``.

        ``None``: there is none.
        """
        if start < self.log_begins[partition]:
            end = min(end, self.archived[partition])
        if start >= end:
            return None
        return Range(start, end if whole else self.random.randint(start + 1, end))

    def changes(
        self, partition: int, tables: Iterable[KeptTable], span: Range, freed: Sequence[int] = ()
    ) -> pa.Table:
        """Records of a range, and some from before it, planned for some versions."""
        offsets, planned = self._offsets[partition], self._planned[partition]
        first, end = bisect_left(offsets, span.start), bisect_left(offsets, span.end)
        found = planned.slice(first, end - first)
        if freed:
            before = planned.take(pa.array([bisect_left(offsets, o) for o in sorted(freed)]))
            found = pa.concat_tables([before, found])
        places, names = _columns(tuple(tables))
        return found.select(places).rename_columns(names)

    # tasks

    def plan_keeping(self, known: Application) -> None:
        """A keeper plans a range of each partition."""
        kept = self.kept(known)
        for p, start in self.core_vector().items():
            if (span := self.span(p, start, self.ends[p], whole=self.is_settling)) is not None:
                riders = tuple(table for table, vector in kept if span.start in vector.values())
                self.pending.append(partial(self._apply, self._core(riders, kept), p, span))

    def plan_trailing(self, known: Application, *, all_of_them: bool = False) -> None:
        """One lagging view plans a range of each partition, or all lagging views do."""
        kept: KeptTables = self.kept(known)
        core, foreign = self.core_vector(), self.foreign_vector()
        behind = [
            (table, vector)
            for table, vector in (*kept, (self.foreign, foreign))
            if any(vector[p] < core[p] for p in PARTITIONS)
        ]
        chosen = behind if all_of_them or not behind else [self.random.choice(behind)]
        for table, vector in chosen:
            for p in PARTITIONS:
                # A range past the core must not be applied: its records are not judged yet.
                far = not all_of_them and self.random.random() < 0.15
                if (span := self.span(p, vector[p], self.ends[p] if far else core[p])) is not None:
                    task = partial(self._trail, self._core((), kept), table, p, span)
                    self.pending.append(task)

    def _core(self, riders: Sequence[KeptTable], kept: KeptTables) -> Core:
        ids = next((table for table, _ in kept if table.merge == "history"), None)
        return Core("order", "orders", tuple(riders), ids=ids)

    def _apply(self, core: Core, partition: int, span: Range) -> None:
        changes = self.changes(partition, core.riders, span)
        if not changes.num_rows:
            advance(self.database, core, {partition: span})
            return
        try:
            done = apply_range(self.store, core, partition, span, changes)
        except PositionMoved:
            self.happened["moved"] += 1
            return
        self.happened["released"] += done.released
        for failed in done.failures:
            self.happened["behind"] += 1
            row = self.database.table("view").get((failed.view, failed.version))
            if row is not None:
                note(self.database, row, error=failed.reason)

    def _trail(self, core: Core, table: KeptTable, partition: int, span: Range) -> None:
        freed = [
            row
            for (p, *_), row in self.database.table("held").items()
            if p == partition
            and row.released_at in range(span.start, span.end)
            and row.offset < span.start
        ]
        places = self.foreign_positions if table.view == self.foreign.view else self.database
        position = places.table("position").get((table.view, table.version, partition))
        if position is not None and position[0] == span.start:  # else the task comes too late
            assert all(row.change.num_rows for row in freed), "a view needs what was trimmed"
        changes = self.changes(partition, (table,), span, [row.offset for row in freed])
        try:
            meets = self.random.random() < 0.5
            trail_range(self.store, core, table, partition, span, changes, meets=meets)
            self.happened["trailed"] += 1
        except (PositionMoved, ViewFailed):
            self.happened["did not trail"] += 1

    def load(self, row: ViewVersion, vector: Vector, attempt: object) -> None:
        """A build fills its table from the changes that were accepted before its vector."""
        if not self.is_attempt(row, attempt):
            self.happened["left build"] += 1
            return
        table = _table(row.name, row.version, row.fingerprint)
        places = [self._row_of[id(record)] for record in self.accepted_for_build(vector)]
        opened = Opened(self.store, Core("order", "orders"), BASE)
        is_empty = not self.database.table(table.name)
        if places and is_empty:  # rows that an earlier attempt has added are not changed
            changes = self._whole.take(pa.array(places))
            named = {
                planned_column(TABLES[row.name], image): planned_column(table, image)
                for image in table.images
            }
            names = [named.get(name, name) for name in changes.column_names]
            opened.merge(table, Batch(changes.rename_columns(names), {}))
        opened.transaction.commit()
        if self.random.random() < self.killed_builds:
            self.happened["killed build"] += 1
            return
        note(self.database, row, built={"vector": vector}, error=None)
        self.database.table("attempt").pop((row.name, row.version), None)
        self.happened["built"] += 1

    def is_attempt(self, row: ViewVersion, attempt: object) -> bool:
        """Whether a loading build is still the current attempt."""
        return self.database.table("attempt").get((row.name, row.version)) is attempt

    def accepted_for_build(self, vector: Vector) -> list[Any]:
        """The accepted changes in the archive; the core has recorded which are dead (V5)."""
        return accepted(self.judged, vector)

    def empty(self, row: ViewVersion) -> None:
        """Delete the rows of a version that no reader sees."""
        self.database.rows[physical(row.name, row.version)] = {}

    def _refuses(self, table: KeptTable, partition: int, batch: Batch) -> str | None:
        if partition == BASE:
            return None
        offsets = batch.changes["offset"].to_pylist()
        refused = [o for o in offsets if (table.view, partition, o) in self.failing]
        return f"offset {refused[0]} is refused" if refused else None
