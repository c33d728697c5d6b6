"""A captured PostgreSQL database: publication, slot and its state, and our two tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Literal

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row

from everstate.config import check_dsn
from everstate.declarations.captures import Capture
from everstate.sources.cdc.connectors import (
    POSTGRES_SCHEMA,
    SESSION,
    Address,
    OwnTables,
    SourceColumn,
    TableShape,
)
from everstate.sources.cdc.database import (
    CapturedDatabase,
    ConnectorStanding,
    InexactColumn,
    PrintedRows,
    SetupStep,
    TableState,
    from_raw,
    quoted_name,
)
from everstate.sources.cdc.inexact import inexact_in_postgres
from everstate.sources.cdc.names import CaptureNames
from everstate.sources.cdc.postgres_checks import (
    PostgresChecks,
    create_table,
    lost_slot,
    publication_faults,
    published_tables,
    slot_row,
)
from everstate.sources.cdc.postgres_tables import COLUMNS, STATES, families, shapes
from everstate.telemetry import without_secret

_CONNECT_S: Final = 10
_OLDEST: Final = """\
SELECT since, name, advice FROM (
  SELECT prepared AS since, 'the prepared transaction ' || quote_literal(gid) || ' of ' || owner
    AS name, '`ROLLBACK PREPARED ' || quote_literal(gid) || ';` or COMMIT in database ' || database
    || ' ends it' AS advice FROM pg_prepared_xacts
  UNION ALL SELECT xact_start, 'the transaction of process ' || pid || ' of ' || usename,
    '`SELECT pg_terminate_backend(' || pid || ');` ends it'
  FROM pg_stat_activity WHERE backend_xid IS NOT NULL) AS open
ORDER BY since NULLS LAST LIMIT 1"""
_LOG_END: Final = """\
SELECT pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
  ELSE pg_current_wal_insert_lsn() END, '0/0')::text AS lsn"""


def postgres_address(dsn: str) -> tuple[Address, str]:
    """Address and password of a libpq connection string or URL; raises InvalidConfig."""
    check_dsn("dsn of the capture", dsn)
    parts = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
    options = {name: parts[name] for name in ("sslmode",) if name in parts}
    user = parts.get("user", "postgres")
    host, port = parts.get("host", "localhost"), int(parts.get("port", "5432"))
    address = Address(host, port, user, parts.get("dbname", user), options)
    return address, parts.get("password", "")


class PostgresDatabase(CapturedDatabase):
    """A connection to a captured PostgreSQL database, as the connector's own user."""

    product = "PostgreSQL"
    address_of = staticmethod(postgres_address)
    replacing = "ON CONFLICT (id) DO UPDATE SET data = excluded.data"
    _connection: psycopg.Connection[dict[str, Any]]

    def __init__(self, capture: Capture, names: CaptureNames, dsn: str) -> None:
        beats = f"{POSTGRES_SCHEMA}.beats_{names.identifier}"
        beat = (
            f"INSERT INTO {beats} (source, at) VALUES ('{names.source}', clock_timestamp()) "
            "ON CONFLICT (source) DO UPDATE SET at = excluded.at"
        )
        own = OwnTables(f"{POSTGRES_SCHEMA}.signals_{names.identifier}", beats, beat)
        super().__init__(capture, names, postgres_address(dsn)[0], own)
        with self._translated("connecting"):
            self._connection = psycopg.connect(
                dsn,
                autocommit=True,
                row_factory=dict_row,
                application_name="everstate-cdc",
                connect_timeout=_CONNECT_S,
            )

    def prepare(self) -> list[SetupStep]:
        """Make schema, our two tables and the publication; the connector makes the slot.

        Only a slot that is made together with its snapshot begins exactly where the snapshot
        ends, so that is left to the connector (decision 14).
        """
        with self._translated("preparing"):
            there = self._rows("SELECT FROM pg_namespace WHERE nspname = %s", POSTGRES_SCHEMA)
            making = f"CREATE SCHEMA IF NOT EXISTS {self._quoted(POSTGRES_SCHEMA)}"
            steps = [self._made(f"schema {POSTGRES_SCHEMA}", making, is_there=bool(there))]
            for table in self.own.tables:
                making, is_there = create_table(table, self.own), self._exists(table)
                steps.append(self._made(f"table {table}", making, is_there=is_there))
            return steps + self._make_publication()

    def release(self) -> list[SetupStep]:
        """Remove the tables from the publication that reject UPDATE and DELETE because of it."""
        name, steps = self._names.identifier, list[SetupStep]()
        with self._translated("releasing the tables"):
            tables = published_tables(self._rows, name)
            for table, family in families(self._rows, tables).items():
                if all(each.is_writable for each in family):
                    continue
                # Tables that inherit from it are not always published.
                drop = f"ALTER PUBLICATION {self._quoted(name)} DROP TABLE ONLY"
                self._execute(f"{drop} {self._quoted(table)}")
                note = f"UPDATE and DELETE of {table} failed while it was published"
                steps.append(SetupStep(f"table {table} of publication {name}", "removed", note))
        return [*steps, SetupStep(f"slot {name}", "kept")]

    def begin_anew(self) -> list[SetupStep]:
        """Drop the slot: the connector makes another one, which begins where its snapshot ends."""
        with self._translated("dropping the slot"):
            done: Literal["removed", "there"] = "removed" if self._drop_slot() else "there"
        return [SetupStep(f"slot {self._names.identifier}", done)]

    def remove(self) -> list[SetupStep]:
        """Drop slot, publication and our two tables."""
        name = self._names.identifier
        with self._translated("removing"):
            had = bool(self._rows("SELECT FROM pg_publication WHERE pubname = %s", name))
            publication = f"DROP PUBLICATION IF EXISTS {self._quoted(name)}"
            return [
                self._dropped(f"slot {name}", self._drop_slot),
                self._dropped(f"publication {name}", publication, is_there=had),
                *(
                    self._dropped(f"table {table}", f"DROP TABLE IF EXISTS {self._quoted(table)}")
                    for table in self.own.tables
                ),
            ]

    def _dropped(
        self, what: str, drop: str | Callable[[], bool], *, is_there: bool = True
    ) -> SetupStep:
        """Drop one thing; what the user may not drop is kept, with the statement for its owner."""
        try:
            if isinstance(drop, str):
                self._execute(drop)
            else:
                is_there = drop()
        except psycopg.errors.InsufficientPrivilege as cause:
            slot = f"SELECT pg_drop_replication_slot('{self._names.identifier}')"
            statement = drop if isinstance(drop, str) else slot
            note = f"{_reason(cause)}; somebody who may do it runs: {statement};"
            return SetupStep(what, "kept", note)
        return SetupStep(what, "removed" if is_there else "there")

    def _checks(self) -> PostgresChecks:
        return PostgresChecks(self._rows, self._capture, self._names, self.own)

    def columns(self, table: str) -> list[dict[str, Any]]:
        """See ``postgres_tables.COLUMNS``."""
        with self._translated("reading the columns"):
            return self._rows(COLUMNS, [table])

    def shapes(self, settings: Mapping[str, str]) -> Mapping[str, TableShape]:
        """Columns that the log or the publication leave out are looked up, and each type."""
        with self._translated("reading the columns"):
            return shapes(self._rows, self._capture, self._names.identifier, settings)

    def printed_rows(self, table: str, columns: Sequence[SourceColumn]) -> PrintedRows:
        """By COPY, with the settings of a connector's sessions."""
        named = [(quoted_name(each.name), each.kind.endswith("[]")) for each in columns]
        listed = ", ".join(f"to_json({name})" if is_array else name for name, is_array in named)
        query = f"COPY (SELECT {listed} FROM {self._quoted(table)}) TO STDOUT"
        with self._translated(f"reading {table}"):
            for name, value in re.findall(r"(\w+)=(\w+)", f"{SESSION} timezone=UTC"):
                self._rows("SELECT set_config(%s, %s, false)", name, value)
            with self._connection.cursor() as cursor, cursor.copy(query.encode()) as copy:
                yield from copy.rows()

    def log_place(self) -> int:
        """Where the log's next record will be."""
        with self._translated("asking where the log ends"):
            return int(self._rows(_LOG_END)[0]["lsn"])

    def has_passed(self, offset: Mapping[str, Any], place: Any) -> bool:
        """Transactions are read in the order in which they were committed."""
        return int(offset.get("lsn") or 0) >= int(place)

    def table_states(self) -> tuple[int, Mapping[str, TableState]]:
        """Columns by number, and files of tables and partitions by oid."""
        with self._translated("looking at the tables"):
            try:
                with self._transaction():
                    # The size of a table that is being altered cannot be asked.
                    self._execute("SET LOCAL lock_timeout = '500ms'")
                    rows = self._rows(STATES, list(self._capture.tables))
            except psycopg.errors.LockNotAvailable:
                return 0, {}
        seen = max((row.pop("seen") for row in rows), default=0)
        return seen, {row.pop("name"): TableState(**row) for row in rows}

    def has_older_row(self, part: str, seen: int) -> bool:
        """Whether VACUUM FULL or CLUSTER, and not TRUNCATE, made a new file; takes at most 2 s."""
        named = "SELECT (%s::oid)::regclass::text AS name"
        try:
            with self._transaction():
                # A statement that changes the table waits for the answer.
                self._execute("SET LOCAL statement_timeout = '2s'")
                name = self._rows(named, part.partition(".")[0])[0]["name"]
                older = f"SELECT FROM ONLY {name} WHERE age(xmin) > age(%s::xid) LIMIT 1"
                return bool(self._rows(older, str(seen % 2**32)))
        except psycopg.Error:
            return False

    def inexact_columns(self) -> list[InexactColumn]:
        """Columns that Debezium does not carry as they are; a pass over tables with days."""
        with self._translated("reading the types of columns"):
            # In the texts of constraints times are written in this zone.
            self._execute("SET TIME ZONE 'UTC'")
            return list(inexact_in_postgres(self._rows, self._capture.tables))

    def check_condition(self, table: str, condition: str) -> None:
        """Have the server plan a query with the condition."""
        with self._translated(f"looking at the condition {condition}"):
            # The user's own text, run with the rights of the connector's user, as the connector
            # will run it.
            plan = f"EXPLAIN SELECT FROM {self._quoted(table)} WHERE ({condition})"
            # A prepared statement cannot contain more than one statement.
            self._connection.execute(plan.encode(), prepare=True)

    def identity(self) -> str:
        """The cluster's system identifier, which `initdb` makes."""
        with self._translated("asking which server it is"):
            (row,) = self._rows("SELECT system_identifier::text AS id FROM pg_control_system()")
        return f"system {row['id']}"

    def went_back(self, place: bytes, offset: Mapping[str, Any]) -> str | None:
        """Why the log cannot contain what was read: it ends before it."""
        end = self.log_place()
        # The connector reads on while no captured table changes: its position is the later one.
        lsn = int(offset.get("lsn") or 0)
        if len(place) == 16:
            lsn = max(lsn, int.from_bytes(place[8:16], "big"))
        if end >= lsn:
            return None
        return f"its log ends at {end:,}, and {lsn:,} was read of it before"

    def standing(self, offset: Mapping[str, Any]) -> ConnectorStanding:
        """Read the slot: whether a session uses it, and how much log the server keeps for it."""
        with self._translated("asking for the slot"):
            row = slot_row(self._rows, self._names.identifier)
            waits_for = None if row is None or row["end"] is not None else self._before_slot()
        if row is None:
            # Without a stored position the first snapshot, which makes the slot, is still to come.
            missing = f"there is no slot {self._names.identifier}"
            return ConnectorStanding(False, None, None, missing, is_lost=bool(offset))
        if waits_for is not None:
            return ConnectorStanding(False, None, row["held"], waits_for)
        note = lost_slot(row, offset)
        return ConnectorStanding(
            bool(row["active"]), row["behind"], row["held"], note, is_lost=note is not None
        )

    def _before_slot(self) -> str:
        """Why a new slot is not ready: it waits for transactions that began before it."""
        name, open_ones = f"slot {self._names.identifier}", self._rows(_OLDEST)
        if not open_ones:
            return f"{name} is being made"
        (row,) = open_ones
        return f"{name} waits for {row['name']}, open since {row['since']}: {row['advice']}"

    def _literal(self, value: Any, kind: str, is_raw: bool) -> str:
        given = from_raw(value, kind) if is_raw else value
        return f"{sql.Literal(given).as_string(self._connection)}::{kind}"

    def _make_publication(self) -> list[SetupStep]:
        """Make the publication, or add the tables and the setting that it lacks."""
        name = self._names.identifier
        what, changed = f"publication {name}", set[str]()
        for fault in publication_faults(self._rows, name, self._capture, self.own):
            self._execute(fault.sql)
            if fault.tables is None:
                return [SetupStep(what, "made")]
            changed.update(fault.tables)
        if not changed:
            return [SetupStep(what, "there")]
        return [self._published_late(what, table) for table in sorted(changed)]

    def _published_late(self, what: str, table: str) -> SetupStep:
        """The step for a table that was added; an existing slot has none of its earlier changes."""
        if table in self.own.tables or slot_row(self._rows, self._names.identifier) is None:
            return SetupStep(f"{what}, table {table}", "changed")
        read = f"`everstate cdc snapshot {self._capture.name} --table {table}`"
        note = f"what {table} has had so far was not captured: {read} reads its rows again"
        return SetupStep(f"{what}, table {table}", "changed", note, table)

    def _drop_slot(self) -> bool:
        """Drop the slot; whether there was one."""
        name = self._names.identifier
        row = slot_row(self._rows, name)
        if row is None:
            return False
        if row["active"]:
            # The connector is gone; its session may need a moment to notice.
            self._rows("SELECT pg_terminate_backend(%s, 5000)", row["active_pid"])
        # One that is still being made is gone with its session.
        drop = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
        self._rows(f"{drop} WHERE slot_name = %s", name)
        return True

    def _execute(self, query: str, *arguments: object) -> int:
        return self._connection.execute(query.encode(), arguments or None).rowcount

    def _rows(self, query: str, *arguments: object) -> list[dict[str, Any]]:
        return self._connection.execute(query.encode(), arguments or None).fetchall()

    def _transaction(self) -> AbstractContextManager[Any]:
        return self._connection.transaction()

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as cause:
            is_away = isinstance(cause, psycopg.OperationalError | psycopg.InterfaceError)
            raise self._failed(doing, _reason(cause), is_away=is_away) from cause


def _reason(error: psycopg.Error) -> str:
    """PostgreSQL's error message in one line, with its detail and hint."""
    told = error.diag.message_primary, error.diag.message_detail, error.diag.message_hint
    parts = [part for part in told if part] or [str(error).strip().partition("\n")[0]]
    return without_secret(" ".join(f"{part.rstrip('.')}." for part in parts)).rstrip(".")
