"""Transactions of the core and of trailing views in PostgreSQL."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, ClassVar, Final
from uuid import UUID

import psycopg
import pyarrow as pa

from everstate.errors import PositionMoved, Unavailable, ViewFailed, ViewStoreError
from everstate.postgres import connect, identifier
from everstate.views.batch import Batch
from everstate.views.control import Control
from everstate.views.control.verdicts import CoreTables
from everstate.views.core import Again, Failure, Refused
from everstate.views.gate import GateRow, Ints, Keys
from everstate.views.images import cut
from everstate.views.stores.postgres import writes
from everstate.views.stores.postgres.loading import LoadTask, attempting
from everstate.views.stores.postgres.refusals import (
    MET_ANOTHER,
    OF_THE_DATA,
    culprit,
    is_of_a_view,
    reason_of,
    refused_as,
    suspects,
)
from everstate.views.stores.postgres.session import StoreSession, session
from everstate.views.stores.postgres.writes import GATE_STAGE, WritePlace
from everstate.views.tables import HOME, Core, KeptTable
from everstate.views.trailing import Exceptions

logger = logging.getLogger(__name__)

RIDING_TRIES_MAX: Final = 32
"""More savepoints than this in one transaction slow every reader of the database."""
# A rider that waits for a lock or computes longer than this is left to lag; the core continues.
_RIDERS_BEGIN: Final = (
    "SAVEPOINT riders; SET LOCAL lock_timeout = '5s'; SET LOCAL statement_timeout = '120s'"
)
_RIDERS_END: Final = (
    "RELEASE SAVEPOINT riders; SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = 0"
)
# A trailing view's core may be held meanwhile.
_TRAILING_BEGIN: Final = b"SET LOCAL lock_timeout = '5s'; SAVEPOINT view"


@contextmanager
def _rolled_back(found: StoreSession) -> Iterator[None]:
    """Begin a transaction; it is rolled back at the end unless it was committed."""
    connection = found.connection
    connection.execute("BEGIN")
    try:
        yield
    except MET_ANOTHER as cause:
        raise Again(reason_of(cause)) from cause
    finally:
        status = connection.info.transaction_status
        if not connection.closed and status != psycopg.pq.TransactionStatus.IDLE:
            connection.execute("ROLLBACK")


def commit(found: StoreSession, reached: Callable[[Control], bool], schema_name: str) -> None:
    """Commit; when the server's answer is lost, the position shows whether it committed."""
    try:
        found.connection.execute("COMMIT")
    except psycopg.OperationalError as lost:
        try:
            with connect(found.dsn) as other:
                done = reached(Control(other, schema_name))
        except psycopg.OperationalError:
            raise lost from None
        if not done:
            raise Unavailable(
                "the views' database lost the connection during a commit, and the commit did not "
                "happen"
            ) from lost


class PostgresCore(CoreTables):
    """One transaction of a core; see :class:`everstate.views.core.CoreTransaction`."""

    def __init__(self, found: StoreSession, schema_name: str, core: Core, partition: int) -> None:
        super().__init__(found.connection, schema_name, core, partition)
        self.session = found
        self.place = WritePlace(schema_name, core.generation, partition)

    def prepare(self) -> None:
        """Create this session's staging tables; outside a transaction, so that they stay."""
        writes.prepare_stage(self.session, GATE_STAGE, writes.GATE_ROW)
        schema, table = self.place.schema_name, self.core.table
        with refused_as(lambda reason: ViewStoreError(f"{table}: {reason}")):
            row = writes.like_latest(schema, self.core)
            writes.prepare_stage(self.session, writes.stage_name(table), row)
        self._unprepared: dict[str, str] = {}
        self._writing: KeptTable | None = None
        """The rider whose rows are being written."""
        for rider in self.core.riders:
            try:
                writes.prepare_view(self.session, schema, rider)
            except psycopg.Error as cause:
                if not is_of_a_view(cause):
                    raise
                self._unprepared[rider.name] = reason_of(cause)

    def gates(self, keys: Keys, first: Ints) -> dict[str, GateRow]:
        """Gate rows of keys whose first version does not follow, or whose time is older."""
        stage = writes.stage_of(GATE_STAGE)
        columns = {
            "key": keys.names,
            "first_version": pa.array(first),
            "first_at": keys.changes["occurred_at"].take(pa.array(keys.firsts)),
        }
        writes.copy_rows(self.session, stage, columns)
        gate = identifier(self.place.schema_name, self.core.table)
        query = (
            "SELECT asked.key, gate.version, gate.change_id::text, gate.as_of "
            f"FROM {stage} AS asked LEFT JOIN {gate} AS gate ON gate.key = asked.key "
            "WHERE gate.version IS DISTINCT FROM nullif(asked.first_version - 1, 0) "
            "OR gate.as_of > asked.first_at"
        )
        return {
            key: GateRow(version or 0, change_id, as_of)
            for key, version, change_id, as_of in writes.merge(self.session, query)
        }

    def ids(self, versions: Iterable[tuple[str, int]]) -> Mapping[tuple[str, int], str]:
        """Ids of applied versions, as far as the history has them."""
        asked = list(versions)
        if self.core.ids is None or not asked:
            return {}
        history = identifier(self.place.schema_name, self.core.ids.name)
        query = (
            f"SELECT kept.key, kept.version, kept.change_id::text FROM {history} AS kept "
            "JOIN unnest(%s::text[], %s::bigint[]) AS asked(key, version) "
            "ON kept.key = asked.key AND kept.version = asked.version"
        )
        lists = ([key for key, _ in asked], [version for _, version in asked])
        rows = self.session.connection.execute(query.encode(), lists)
        return {(key, version): change_id for key, version, change_id in rows}

    def unstorable(self, changes: pa.Table) -> dict[int, str]:
        """Changes whose texts jsonb refuses; PostgreSQL is asked about all suspects at once."""
        rows = suspects(changes.select(["offset", "raw_value"])).to_pylist()
        if not rows:
            return {}
        self._execute("SAVEPOINT asked")
        try:
            found = self._refused_texts(rows)
        except OF_THE_DATA:
            found = {}
            for row in rows:
                self._execute("ROLLBACK TO SAVEPOINT asked")
                try:
                    found |= self._refused_texts([row])
                except OF_THE_DATA as cause:
                    found[row["offset"]] = reason_of(cause)
            self._execute("ROLLBACK TO SAVEPOINT asked")
        self._execute("RELEASE SAVEPOINT asked")
        return found

    def _refused_texts(self, rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
        """Offsets of messages with a text that jsonb refuses, with its reasons."""
        offsets, texts = list[int](), list[str]()
        for row in rows:
            images = cut([row["raw_value"]])
            for text in (images.provenance, images.transaction, images.event, images.state):
                offsets.append(row["offset"])
                texts.append(text[0].as_py())
        query = (
            "SELECT \"offset\", (pg_input_error_info(text, 'jsonb')).message "
            'FROM unnest(%s::bigint[], %s::text[]) AS asked("offset", text) '
            "WHERE NOT pg_input_is_valid(text, 'jsonb')"
        )
        return dict(self.session.connection.execute(query, (offsets, texts)).fetchall())

    def write_latest(self, batch: Batch) -> None:
        """Put the newest change of each key into `latest`; raises Refused with the offset."""
        self._execute("SAVEPOINT latest")

        def write(part: Batch) -> None:
            writes.write_latest(self.session, self.place, self.core, part)

        with refused_as(lambda why: ViewStoreError(f"{self.core.view} cannot be written: {why}")):
            try:
                write(batch)
            except OF_THE_DATA as cause:
                found = culprit(write, batch, lambda: self._execute("ROLLBACK TO SAVEPOINT latest"))
                if found is None:
                    raise
                raise Refused(found[0], reason_of(cause)) from cause

    def write_next(self, batch: Batch) -> Mapping[str, datetime] | None:
        """Write `latest` only if the first change of every key follows the stored version."""
        try:
            return writes.write_next(self.session, self.place, self.core, batch)
        except (psycopg.Error, *OF_THE_DATA) as cause:
            if not is_of_a_view(cause):
                raise
            return None

    def ride(
        self, riders: Sequence[KeptTable], start: int, end: int, batch: Batch
    ) -> list[Failure]:
        """Write riders at ``start``; one that fails is found at once, and the others are written.

        Cost: those that were written before one that fails are written twice. After many failures
        the others trail.
        """
        able = [rider for rider in riders if rider.name not in self._unprepared]
        failures = [
            Failure(rider.view, rider.version, self._unprepared[rider.name])
            for rider in riders
            if rider.name in self._unprepared
        ]
        waiting, tries = [able] if able else [], 0
        while waiting and tries < RIDING_TRIES_MAX:
            some, tries = waiting.pop(), tries + 1
            found = self._fault(some, start, end, batch)
            if found is not None:
                failing, cause = found
                failures.append(Failure(failing.view, failing.version, reason_of(cause)))
                place = some.index(failing)
                waiting += [part for part in (some[place + 1 :], some[:place]) if part]
        return failures

    def _fault(
        self, riders: Sequence[KeptTable], start: int, end: int, batch: Batch
    ) -> tuple[KeptTable, BaseException] | None:
        """Write some riders; returns the one that was being written when it failed, if any does."""
        self._execute(_RIDERS_BEGIN)
        self._writing = None
        try:
            self._ride_together(riders, start, end, batch)
        except (psycopg.Error, *OF_THE_DATA) as cause:
            if self._writing is None or not is_of_a_view(cause):
                raise
            self._execute(f"ROLLBACK TO SAVEPOINT riders; {_RIDERS_END}")
            return self._writing, cause
        self._execute(_RIDERS_END)
        return None

    def _ride_together(
        self, riders: Sequence[KeptTable], start: int, end: int, batch: Batch
    ) -> None:
        moved = self.take_riders(riders, start, end)
        for rider in riders:
            if rider.name in moved and batch.changes.num_rows:
                self._writing = rider
                self.write_rider(rider, batch)

    def write_rider(self, rider: KeptTable, batch: Batch) -> None:
        """Merge a batch into one rider's table."""
        writes.write_view(self.session, self.place, rider, batch)

    def commit(self, end: int) -> None:
        """Commit; when the server's answer is lost, the position shows whether it committed."""

        def reached(control: Control) -> bool:
            return (control.core_position(self.core, self.partition) or 0) >= end

        commit(self.session, reached, self.place.schema_name)

    def _execute(self, statement: str) -> None:
        self.session.connection.execute(statement.encode())


class PostgresTrailing:
    """One transaction of a trailing view; see :class:`everstate.views.trailing`."""

    def __init__(
        self, found: StoreSession, schema_name: str, core: Core, table: KeptTable, partition: int
    ) -> None:
        self.session, self.core, self.table = found, core, table
        self.partition = partition
        self.control = Control(found.connection, schema_name)
        self.place = WritePlace(schema_name, core.generation, partition)

    def prepare(self) -> None:
        """Create the view's staging table, if its rows are in this store."""
        if self.table.store != HOME:
            return
        with refused_as(lambda reason: ViewFailed(self.table.view, reason)):
            writes.prepare_view(self.session, self.place.schema_name, self.table)

    def core_position(self, *, hold: bool) -> int:
        """The core's position; ``hold``: lock it until this transaction ends (V7)."""
        found = self.control.core_position(self.core, self.partition, hold=hold)
        if found is None:
            raise PositionMoved(
                f"{self.core.view} has no position in partition {self.partition}, or another "
                "release wrote it."
            )
        return found

    def take(self, start: int, end: int) -> bool:
        """Compare and swap the view's position (V10)."""
        generation = self.core.generation
        return self.control.take_view(self.table, generation, self.partition, start, end)

    def exceptions(self, start: int, end: int) -> Exceptions:
        """The core's exceptions in a range."""
        return self.control.exceptions(self.core, self.partition, start, end)

    def floors(self, batch: Batch) -> Mapping[str, datetime]:
        """Stored as-of times; only a history needs them, and has them."""
        if self.table.merge != "history":
            return {}
        query = (
            "SELECT DISTINCT ON (key) key, as_of FROM "
            f"{identifier(self.place.schema_name, self.table.name)} WHERE key = ANY(%s) "
            "ORDER BY key, version DESC"
        )
        keys = (batch.keys.names.to_pylist(),)
        return dict(self.session.connection.execute(query.encode(), keys).fetchall())

    def write(self, batch: Batch) -> None:
        """Merge the batch into the view's table; a ViewFailed names the change at fault."""
        connection = self.session.connection
        connection.execute(_TRAILING_BEGIN)

        def write(part: Batch) -> None:
            writes.write_view(self.session, self.place, self.table, part)

        try:
            write(batch)
        except (psycopg.Error, *OF_THE_DATA) as cause:
            if not is_of_a_view(cause):
                raise
            offset: int | None = None
            key: str | None = None
            if isinstance(cause, OF_THE_DATA):

                def rollback() -> None:
                    connection.execute("ROLLBACK TO SAVEPOINT view")

                offset, key = culprit(write, batch, rollback) or (None, None)
            raise ViewFailed(self.table.view, reason_of(cause), offset=offset, key=key) from cause

    def commit(self, end: int) -> None:
        """Commit; when the server's answer is lost, the position shows whether it committed."""
        generation = self.core.generation

        def reached(control: Control) -> bool:
            vector = control.vector(self.table.view, self.table.version, generation)
            return vector.get(self.partition, 0) >= end

        commit(self.session, reached, self.place.schema_name)


class PostgresViewStore:
    """Cores and views in one schema of a PostgreSQL database; for one thread."""

    core_class: ClassVar[type[PostgresCore]] = PostgresCore
    trailing_class: ClassVar[type[PostgresTrailing]] = PostgresTrailing

    def __init__(self, dsn: str, schema_name: str) -> None:
        self.dsn, self.schema_name = dsn, schema_name

    def loader(self, table: KeptTable, attempt: UUID) -> LoadTask:
        """The task that fills a version."""
        return LoadTask(self.dsn, self.schema_name, table, attempt)

    @contextmanager
    def attempting(self, table: KeptTable, attempt: UUID) -> Iterator[None]:
        """A transaction that holds an attempt to build a version; raises BuildGivenUp."""
        with session(self.dsn) as found, attempting(found, self.schema_name, table, attempt):
            yield

    @contextmanager
    def writing(self, table: KeptTable, partition: int) -> Iterator[bool]:
        """Let nobody else write rows of a version to another store; false while another does."""
        with session(self.dsn) as found:
            control = Control(found.connection, self.schema_name)
            with control.writing(table.view, table.version, partition) as is_alone:
                yield is_alone

    @contextmanager
    def transaction(self, core: Core, partition: int) -> Iterator[PostgresCore]:
        """A transaction of a core; see :class:`everstate.views.core.CoreStore`."""
        with session(self.dsn) as found:
            opened = self.core_class(found, self.schema_name, core, partition)
            opened.prepare()
            with _rolled_back(found):
                yield opened

    @contextmanager
    def trailing(self, core: Core, table: KeptTable, partition: int) -> Iterator[PostgresTrailing]:
        """A transaction of a trailing view; see :class:`everstate.views.trailing.TrailingStore`."""
        with session(self.dsn) as found:
            opened = self.trailing_class(found, self.schema_name, core, table, partition)
            opened.prepare()
            with _rolled_back(found):
                yield opened

    def take_deferred(self, core: Core, table: KeptTable, most: int, *, waits: bool = True) -> int:
        """Apply a view's oldest deferred changes in one commit; returns how many.

        At most ``most`` of them, which must be above 0, and those of one stored part. The core's
        position row is locked first, as the core itself does, so that the core waits and no rider
        is left behind. 0: there is none, or the view's position is of another plan meanwhile, or
        the core is writing all these partitions just now and ``waits`` is false. Raises
        Unavailable, psycopg's errors.
        """
        with session(self.dsn) as found:
            writes.prepare_view(found, self.schema_name, table)
            control = Control(found.connection, self.schema_name)
            with found.connection.transaction():
                partition = control.hold_deferred(core, table, waits=waits)
                if partition is None or not control.hold_view(table, core.generation, partition):
                    return 0
                place = WritePlace(self.schema_name, core.generation, partition)
                deferred = writes.deferred_of(found, place, table)
                if (part := deferred.oldest()) is None:
                    return 0
                number, stored = part
                batch = stored.first(most)
                writes.merge_view(found, place, table, batch)
                deferred.applied(number, stored.changes, batch.changes.num_rows)
            return int(batch.changes.num_rows)

    def position(self, core: Core, partition: int) -> int | None:
        """The core's position in a partition."""
        with session(self.dsn) as found:
            return Control(found.connection, self.schema_name).core_position(core, partition)
