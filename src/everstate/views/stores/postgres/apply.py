"""The apply half: a range of one partition goes into a view group in one transaction.

Data and position commit together (law 4): the first statement of the transaction compares and
swaps the position; whoever loses changes nothing (C11). The position comes from the range, never
from rows (C12).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from everstate.errors import PositionMoved, Unavailable, ViewFailed, ViewStoreError
from everstate.log.positions import Range
from everstate.views.database import connect_views
from everstate.views.stores.postgres import writes
from everstate.views.stores.postgres.gate import NO_VERSION, GateRow, Ints, Keys, Verdict, judge
from everstate.views.stores.postgres.group import (
    GroupPlan,
    LinearTable,
    RowTable,
    columns_ddl,
)
from everstate.views.stores.postgres.held import bury, held_at, held_keys, hold, let_go, read_held
from everstate.views.stores.postgres.session import Session, session
from everstate.views.stores.postgres.writes import GATE_STAGE, Batch, prepare_stage, stage_name

log = logging.getLogger(__name__)

RETRIES_MAX: Final = 5
REFUSED: Final = "refused_by_store"
_RETRIED: Final = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)
# The change's own fault, so that the change can be found by halving the batch.
_DATA: Final = (
    psycopg.DataError,
    psycopg.IntegrityError,
    psycopg.errors.ProgramLimitExceeded,
    pa.ArrowException,
    # A message that Spark's parser can read and the cutting of its images cannot.
    msgspec.MsgspecError,
    RecursionError,
)


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a range's records in one view group.

    ``applied`` counts changes too that had waited, and ``dead`` those of them that the tables
    refused; ``released`` is how many both were. Of the records, applied - released + duplicate +
    held + dead were read past the position.
    """

    applied: int = 0
    duplicate: int = 0
    held: int = 0
    dead: int = 0
    released: int = 0
    skipped_below_position: int = 0


@dataclass(frozen=True, slots=True)
class _Write:
    """One table's write; ``core`` tables are kept for every view of the entity type."""

    view: str
    run: Callable[[Batch], None]
    core: bool


class _CoreRefused(Exception):
    """A core table refuses a change, which is dead for every view (C19)."""

    def __init__(self, offset: int, reason: str) -> None:
        self.offset, self.reason = offset, reason
        super().__init__(reason)


class _LostRace(Exception):
    """The position is not where this attempt thought."""


def apply_range(
    dsn: str, group: GroupPlan, partition: int, given: Range, changes: pa.Table
) -> Applied:
    """Apply one partition's range to a view group: rows, position and counters in one commit.

    ``changes`` has every record that was served in ``given``, with its planned columns; records
    below the position are skipped, a range that is done changes nothing. Raises PositionMoved
    when the group is behind the range or the plan is outdated, ViewFailed when one view cannot
    take a change, HeldOverflow, and Unavailable when the database is away; nothing is changed
    then. Cost: about fifteen round trips, and work that grows with the changes alone.
    """
    with session(dsn) as found:
        return Applier(found, group, partition).run(given, changes)


def advance(dsn: str, group: GroupPlan, ranges: Mapping[int, Range]) -> None:
    """Move positions over ranges in which no record was served (C12).

    Ranges that begin past the position change nothing.
    """
    if not ranges:
        return
    query = sql.SQL(
        "UPDATE {} AS position SET next_offset = wanted.to_offset, updated_at = now() "
        "FROM unnest(%s::int[], %s::bigint[], %s::bigint[]) "
        "AS wanted(partition, from_offset, to_offset) "
        "WHERE view_group = %s AND generation = %s AND epoch = %s "
        "AND position.partition = wanted.partition "
        "AND next_offset >= wanted.from_offset AND next_offset < wanted.to_offset"
    ).format(sql.Identifier(group.schema_name, "position"))
    with session(dsn) as found:
        found.connection.execute(
            query,
            (
                list(ranges),
                [given.start for given in ranges.values()],
                [given.end for given in ranges.values()],
                group.view_group,
                group.generation,
                group.epoch,
            ),
        )


class Applier:
    """Applies ranges of one partition to one view group through one session."""

    def __init__(self, session: Session, group: GroupPlan, partition: int) -> None:
        self.session = session
        self.group = group
        self.partition = partition
        self._position = sql.Identifier(group.schema_name, "position")
        self._place = (group.view_group, group.generation, partition)

    @property
    def _only_view(self) -> str:
        """The view of a group that keeps one view alone."""
        return self.group.view_group.rpartition("/")[2]

    def run(self, given: Range, changes: pa.Table) -> Applied:
        """Apply a range; see :func:`apply_range`."""
        offsets = changes["offset"].to_numpy()
        if np.any(offsets[1:] <= offsets[:-1]):
            changes = changes.sort_by("offset")
        start, poison, retries = given.start, self._known_poison(given), 0
        while True:
            try:
                return self._attempt(start, given, changes, poison)
            except _LostRace:
                position = self._read_position()
                if position >= given.end:
                    return Applied(skipped_below_position=changes.num_rows)
                if position < given.start:
                    raise PositionMoved(
                        f"{self.group.view_group} is at {position:,} of partition "
                        f"{self.partition}, behind the range from {given.start:,}."
                    ) from None
                start = position
            except _CoreRefused as refusal:
                if refusal.offset in poison:
                    raise ViewStoreError(
                        f"{self.group.view_group}: offset {refusal.offset:,} is refused again "
                        f"after it was taken out: {refusal.reason}"
                    ) from refusal
                poison[refusal.offset] = f"{REFUSED}: {refusal.reason}"
            except _RETRIED as cause:
                retries += 1
                if retries > RETRIES_MAX:
                    raise Unavailable(
                        f"{self.group.view_group}: {retries} attempts on partition "
                        f"{self.partition} met another transaction ({_reason(cause)})"
                    ) from cause

    def _known_poison(self, given: Range) -> dict[int, str]:
        """Changes that the main group's tables refused: they are dead for a view alone too."""
        if self.group.keeps_latest:
            return {}
        # A change that waits was read before this range, and may be refused when it is let go.
        query = sql.SQL(
            'SELECT "offset", reason FROM {} WHERE topic = %s AND partition = %s '
            'AND ("offset" >= %s AND "offset" < %s OR "offset" IN (SELECT "offset" FROM {} '
            "WHERE view_group = %s AND generation = %s AND partition = %s)) "
            "AND starts_with(reason, %s)"
        ).format(
            sql.Identifier(self.group.schema_name, "dead"),
            sql.Identifier(self.group.schema_name, "held"),
        )
        place = (self.group.topic, self.partition, given.start, given.end, *self._place, REFUSED)
        return dict(self.session.connection.execute(query, place).fetchall())

    def _read_position(self) -> int:
        query = sql.SQL(
            "SELECT next_offset, epoch FROM {} "
            "WHERE view_group = %s AND generation = %s AND partition = %s"
        ).format(self._position)
        row = self.session.connection.execute(query, self._place).fetchone()
        if row is None or row[1] != self.group.epoch:
            raise PositionMoved(
                f"{self.group.view_group} has no position of this plan for partition "
                f"{self.partition}.",
                advice="Read the groups' positions and plans again.",
            )
        return int(row[0])

    def _attempt(
        self, start: int, given: Range, changes: pa.Table, poison: Mapping[int, str]
    ) -> Applied:
        """One transaction; raises _LostRace, _CoreRefused or a retried error with nothing done."""
        offsets = changes["offset"].to_numpy()
        mine = changes.filter(pa.array((offsets >= start) & (offsets < given.end)))
        below = int(np.count_nonzero(offsets < start))
        self._prepare()
        connection = self.session.connection
        connection.execute("BEGIN")
        try:
            if not self._take_position(start, given.end):
                raise _LostRace
            applied = self._apply(mine, poison, below)
        except BaseException:
            if not connection.closed:
                connection.execute("ROLLBACK")
            raise
        self._commit(given.end)
        return applied

    def _take_position(self, start: int, end: int) -> bool:
        """Compare and swap the position; whether this attempt may go on (C11)."""
        query = sql.SQL(
            "UPDATE {} SET next_offset = %s, updated_at = now() WHERE view_group = %s "
            "AND generation = %s AND partition = %s AND next_offset = %s AND epoch = %s"
        ).format(self._position)
        values = (end, *self._place, start, self.group.epoch)
        return self.session.connection.execute(query, values).rowcount == 1

    def _commit(self, end: int) -> None:
        """Commit; when the answer is lost, the position tells what happened."""
        try:
            self.session.connection.execute("COMMIT")
        except psycopg.OperationalError as lost:
            query = sql.SQL(
                "SELECT next_offset FROM {} "
                "WHERE view_group = %s AND generation = %s AND partition = %s"
            ).format(self._position)
            try:
                with connect_views(self.session.dsn) as other:
                    row = other.execute(query, self._place).fetchone()
            except psycopg.OperationalError:
                raise lost from None
            if row is None or row[0] < end:
                raise Unavailable("the views' database lost a commit; it was not done") from lost

    def _prepare(self) -> None:
        """Make the staging tables of this session."""
        group = self.group
        types = columns_ddl(("key",)), sql.SQL("first_version bigint, first_at timestamptz")
        prepare_stage(self.session, GATE_STAGE, sql.SQL(", ").join(types))
        tables = [(f"{group.entity}_latest", group.gate_table, "")] if group.keeps_latest else []
        if not group.keeps_latest:
            tables = [(self._only_view, group.gate_table, "")]
        tables += [(view.view, view.table, "present boolean") for view in group.rows]
        tables += [(view.view, view.table, "") for view in group.linears]
        for view, table, more in tables:
            columns = writes.like(group, table, *([more] if more else []))
            try:
                prepare_stage(self.session, stage_name(table), columns)
            except (psycopg.ProgrammingError, psycopg.DataError) as cause:
                if table == group.gate_table:
                    raise ViewStoreError(f"{table}: {_reason(cause)}") from cause
                raise ViewFailed(view, _reason(cause)) from cause

    def _apply(self, changes: pa.Table, poison: Mapping[int, str], below: int) -> Applied:
        """Judge the changes, write what applies, note the rest; inside the transaction."""
        dead = _unreadable(changes, poison)
        readable = pc.is_null(changes["reason"])
        if poison:
            killed = pc.is_in(changes["offset"], pa.array(list(poison), pa.int64()))
            readable = pc.and_(readable, pc.invert(killed))
        alive = changes.filter(readable)
        refused = self._bury_refused(poison)
        keys = Keys(alive)
        verdict = self._judge(keys)
        batch = Batch(_going(alive, verdict), verdict.floors)
        if batch.changes.num_rows:
            # What is written after this can be tried again with fewer changes.
            self.session.connection.execute("SAVEPOINT before_views")
            for write in self._writes():
                self._write(write, batch)
        hold(self.session, self.group, self.partition, alive, verdict.hold)
        let_go(self.session, self.group, self.partition, verdict.released_versions)
        bury(self.session, self.group, self.partition, changes, dead)
        bury(self.session, self.group, self.partition, alive, verdict.dead)
        applied = Applied(
            applied=batch.changes.num_rows,
            duplicate=verdict.duplicates,
            held=len(verdict.hold),
            dead=len(dead) + len(verdict.dead) + refused,
            released=len(verdict.released) + refused,
            skipped_below_position=below,
        )
        self._count(applied)
        return applied

    def _judge(self, keys: Keys) -> Verdict:
        """Compare with the gate; only keys that do not simply go on are brought here."""
        if not len(keys):
            return judge(keys, {}, {}, self._ids)
        waiting = held_keys(self.session, self.group, self.partition)
        first = keys.versions[keys.firsts].copy()
        first[~keys.dense()] = NO_VERSION
        for code in keys.codes_of(waiting):
            if code is not None:
                first[code] = NO_VERSION
        gates = self._gates(keys, first)
        mine = waiting & gates.keys()
        held = read_held(self.session, self.group, self.partition, mine) if mine else {}
        return judge(keys, gates, held, self._ids)

    def _bury_refused(self, poison: Mapping[int, str]) -> int:
        """Bury the changes that wait and that the tables refuse; what comes after them waits."""
        waiting = held_at(self.session, self.group, self.partition, poison) if poison else []
        for version, change in waiting:
            let_go(self.session, self.group, self.partition, [version])
            reason = poison[change["offset"][0].as_py()]
            bury(self.session, self.group, self.partition, change, [(0, reason)])
        return len(waiting)

    def _gates(self, keys: Keys, first: Ints) -> dict[str, GateRow]:
        """Gate rows of the keys whose first version does not follow, or whose time runs back."""
        stage = writes.stage_of(GATE_STAGE)
        columns = {
            "key": keys.names,
            "first_version": pa.array(first),
            "first_at": keys.changes["occurred_at"].take(pa.array(keys.firsts)),
        }
        writes.copy_rows(self.session, stage, columns)
        query = sql.SQL(
            "SELECT asked.key, gate.version, gate.change_id::text, gate.as_of "
            "FROM {} AS asked LEFT JOIN {} AS gate ON gate.key = asked.key "
            "WHERE gate.version IS DISTINCT FROM nullif(asked.first_version - 1, 0) "
            "OR gate.as_of > asked.first_at"
        ).format(stage, sql.Identifier(self.group.schema_name, self.group.gate_table))
        return {
            key: GateRow(version or 0, change_id, as_of)
            for key, version, change_id, as_of in self.session.connection.execute(query)
        }

    def _ids(self, versions: Iterable[tuple[str, int]]) -> Mapping[tuple[str, int], str]:
        """Ids of applied versions, as far as the history has them."""
        asked = list(versions)
        if self.group.ids_table is None or not asked:
            return {}
        query = sql.SQL(
            "SELECT kept.key, kept.version, kept.change_id::text FROM {} AS kept "
            "JOIN unnest(%s::text[], %s::bigint[]) AS asked(key, version) "
            "ON kept.key = asked.key AND kept.version = asked.version"
        ).format(sql.Identifier(self.group.schema_name, self.group.ids_table))
        lists = ([key for key, _ in asked], [version for _, version in asked])
        rows = self.session.connection.execute(query, lists)
        return {(key, version): change_id for key, version, change_id in rows}

    def _writes(self) -> list[_Write]:
        """Writes in their fixed order: the gate, history, then views by name (C17)."""
        found, group, part = [], self.group, self.partition
        where = self.session
        if group.keeps_latest:
            name = f"{group.entity}_latest"
            found.append(_Write(name, lambda b: writes.write_latest(where, group, part, b), True))
        else:
            name = self._only_view
            found.append(_Write(name, lambda b: writes.write_gate(where, group, part, b), True))
        if group.history_table is not None:
            name = f"{group.entity}_history"
            found.append(_Write(name, lambda b: writes.write_history(where, group, part, b), True))
        views: list[RowTable | LinearTable] = [*group.rows, *group.linears]
        for view in sorted(views, key=lambda view: view.view):
            found.append(_Write(view.view, self._view_write(view), False))
        return found

    def _view_write(self, view: RowTable | LinearTable) -> Callable[[Batch], None]:
        where, group, part = self.session, self.group, self.partition
        if isinstance(view, RowTable):
            return lambda batch: writes.write_row_view(where, group, view, batch)
        return lambda batch: writes.write_linear_view(where, group, part, view, batch)

    def _write(self, write: _Write, batch: Batch) -> None:
        """Run a write; a refusal is brought home to the view and, by halving, to the change."""
        try:
            write.run(batch)
        except (*_RETRIED, psycopg.OperationalError) as cause:
            if not isinstance(cause, psycopg.errors.ProgramLimitExceeded):
                raise
            self._refused(write, batch, cause)
        except (psycopg.Error, *_DATA) as cause:
            self._refused(write, batch, cause)

    def _refused(self, write: _Write, batch: Batch, cause: Exception) -> None:
        reason, culprit = _reason(cause), None
        if isinstance(cause, _DATA):
            culprit = self._culprit(write, batch)
        if culprit is None and write.core:
            raise ViewStoreError(f"{write.view} cannot be written: {reason}") from cause
        if culprit is None:
            raise ViewFailed(write.view, reason) from cause
        offset, key = culprit
        if write.core:
            raise _CoreRefused(offset, reason) from cause
        raise ViewFailed(write.view, reason, offset=offset, key=key) from cause

    def _culprit(self, write: _Write, batch: Batch) -> tuple[int, str] | None:
        """Offset and key of the change that a view refuses, found by halving (C19)."""
        good, bad = 0, batch.changes.num_rows
        if self._refuses(write, Batch(batch.changes.slice(0, 0), {})):
            return None
        while bad - good > 1:
            middle = (good + bad) // 2
            if self._refuses(write, batch.first(middle)):
                bad = middle
            else:
                good = middle
        found = batch.changes.slice(bad - 1, 1)
        return found["offset"][0].as_py(), found["key"][0].as_py()

    def _refuses(self, write: _Write, batch: Batch) -> bool:
        self.session.connection.execute("ROLLBACK TO SAVEPOINT before_views")
        try:
            write.run(batch)
        except _DATA:
            return True
        return False

    def _count(self, applied: Applied) -> None:
        query = sql.SQL(
            "UPDATE {} SET applied = applied + %s, duplicate = duplicate + %s, held = held + %s, "
            "dead = dead + %s WHERE view_group = %s AND generation = %s AND partition = %s"
        ).format(sql.Identifier(self.group.schema_name, "counters"))
        gained = (
            applied.applied,
            applied.duplicate,
            applied.held - applied.released,
            applied.dead,
        )
        self.session.connection.execute(query, (*gained, *self._place))


def _unreadable(changes: pa.Table, poison: Mapping[int, str]) -> list[tuple[int, str]]:
    """Rows that are dead before the gate sees them, with their reasons."""
    rows = pc.indices_nonzero(pc.is_valid(changes["reason"])).to_pylist()
    found = [(row, changes["reason"][row].as_py()) for row in rows]
    if poison:
        offsets = changes["offset"].to_pylist()
        found += [(row, poison[o]) for row, o in enumerate(offsets) if o in poison]
    return found


def _going(changes: pa.Table, verdict: Verdict) -> pa.Table:
    """Changes that apply, versions of a key in order.

    A change that was let go may stand before the one that freed it, or come from the store.
    """
    if verdict.ordinary:
        return changes
    going = changes.filter(pa.array(verdict.apply))
    if verdict.released:
        # What waited may have columns of views that left since; none joins while a change waits, so
        # that it has all of those that are kept here.
        names = changes.column_names
        released = [row.select(names) for row in verdict.released]
        # No cast: a side that a change has not (a struct that is null) holds nulls in columns that
        # are never null in a side that it has, and Arrow refuses to cast those.
        going = pa.concat_tables([going, *released], promote_options="permissive")
    order = np.argsort(going["version"].to_numpy(), kind="stable")
    return going.take(pa.array(order))


def _reason(cause: Exception) -> str:
    return str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
