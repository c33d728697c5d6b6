"""A captured PostgreSQL database: publication, slot and its state, and our two tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Literal

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row

from everstate.config import check_dsn
from everstate.declarations.captures import Capture
from everstate.errors import CaptureFailed, InvalidCapture, Unavailable
from everstate.sources.cdc.connectors import (
    POSTGRES_SCHEMA,
    Address,
    OwnTables,
    Peculiarities,
    TableShape,
)
from everstate.sources.cdc.database import (
    MARK,
    ConnectorStanding,
    Finding,
    InexactColumn,
    Key,
    SetupStep,
    TableState,
    from_raw,
    key_values,
)
from everstate.sources.cdc.inexact import (
    POSTGRES_TYPES,
    inexact_in_postgres,
    odd_days_in_postgres,
)
from everstate.sources.cdc.names import CaptureNames
from everstate.sources.cdc.postgres_checks import (
    OPERATIONS,
    check_slot,
    check_tables,
    checks,
    create_publication,
    create_table,
    lost_slot,
    quoted,
    slot_row,
)
from everstate.sources.cdc.postgres_tables import (
    STATES,
    CapturedConnection,
    families,
    identifier,
    shapes,
)
from everstate.telemetry import without_secret

_CONNECT_S: Final = 10
_GENERATED: Final = "it is generated, and its table could not be read again"


def postgres_address(dsn: str) -> tuple[Address, str]:
    """Address and password of a libpq connection string or URL; raises InvalidConfig."""
    check_dsn("dsn of the capture", dsn)
    parts = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
    options = {name: parts[name] for name in ("sslmode",) if name in parts}
    user = parts.get("user", "postgres")
    address = Address(
        host=parts.get("host", "localhost"),
        port=int(parts.get("port", "5432")),
        user=user,
        database=parts.get("dbname", user),
        options=options,
    )
    return address, parts.get("password", "")


def postgres_own(names: CaptureNames) -> OwnTables:
    """Our two tables of one capture."""
    beats = f"{POSTGRES_SCHEMA}.beats_{names.identifier}"
    beat = (
        f"INSERT INTO {beats} (source, at) VALUES ('{names.source}', clock_timestamp()) "
        "ON CONFLICT (source) DO UPDATE SET at = excluded.at"
    )
    return OwnTables(f"{POSTGRES_SCHEMA}.signals_{names.identifier}", beats, beat)


class PostgresDatabase:
    """A connection to a captured PostgreSQL database, as the connector's own user."""

    def __init__(self, capture: Capture, names: CaptureNames, dsn: str) -> None:
        self._capture, self._names = capture, names
        self.address, self._password = postgres_address(dsn)
        self.own = postgres_own(names)
        with self._translated("connecting"):
            self._connection: CapturedConnection = psycopg.connect(
                dsn,
                autocommit=True,
                row_factory=dict_row,
                application_name="everstate-cdc",
                connect_timeout=_CONNECT_S,
            )

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def prepare(self) -> list[SetupStep]:
        """Make schema, our two tables and the publication; the connector makes the slot.

        Only a slot that is made together with its snapshot begins exactly where the snapshot
        ends, so that is left to the connector (decision 14).
        """
        with self._translated("preparing"):
            steps = [self._make_schema(), *map(self._make_table, self.own.tables)]
            steps += self._make_publication()
        return steps

    def release(self) -> list[SetupStep]:
        """Remove the tables from the publication that reject UPDATE and DELETE because of it."""
        name, steps = self._names.identifier, list[SetupStep]()
        with self._translated("releasing the tables"):
            for table, family in families(self._connection, self._members()).items():
                if all(each.is_writable for each in family):
                    continue
                drop = sql.SQL("ALTER PUBLICATION {} DROP TABLE {}")
                self._connection.execute(drop.format(sql.Identifier(name), identifier(table)))
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
            publication = sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(name))
            had = self._one("SELECT FROM pg_publication WHERE pubname = %s", name) is not None
            steps = [
                self._dropped(f"slot {name}", self._drop_slot),
                self._dropped(f"publication {name}", publication, is_there=had),
            ]
            for table in self.own.tables:
                drop = sql.SQL("DROP TABLE IF EXISTS {}").format(identifier(table))
                steps.append(self._dropped(f"table {table}", drop))
        return steps

    def _dropped(
        self, what: str, drop: sql.Composed | Callable[[], bool], *, is_there: bool = True
    ) -> SetupStep:
        """Drop one thing; what the user may not drop is kept, with the statement for its owner."""
        try:
            if isinstance(drop, sql.Composed):
                self._connection.execute(drop)
            else:
                is_there = drop()
        except psycopg.errors.InsufficientPrivilege as cause:
            statement = (
                drop.as_string(self._connection)
                if isinstance(drop, sql.Composed)
                else f"SELECT pg_drop_replication_slot('{self._names.identifier}')"
            )
            note = f"{_reason(cause)}; somebody who may do it runs: {statement};"
            return SetupStep(what, "kept", note)
        return SetupStep(what, "removed" if is_there else "there")

    def check(self) -> list[Finding]:
        """Check settings, rights, publication, replica identities and our tables."""
        with self._translated("checking"):
            return checks(self._connection, self._capture, self._names, self.own)

    def check_slot(self) -> list[Finding]:
        """Check that the slot is there, is read, and holds little of the log."""
        with self._translated("checking the slot"):
            return [check_slot(self._connection, self._capture, self._names, self.own)]

    def check_tables(self) -> list[Finding]:
        """Check keys, replica identities, partitions and inheriting tables of captured tables."""
        with self._translated("checking the tables"):
            return check_tables(self._connection, self._capture, self._names, self.own)

    def peculiarities(self) -> Peculiarities:
        """Generated columns, which the log lacks and a snapshot has, and tables without a key."""
        with self._translated("reading the tables"):
            found = families(self._connection, self._capture.tables)
        declared = {table: self._capture.tables[table].key_columns for table in found}
        return Peculiarities(
            left_out={
                t: dict.fromkeys(family[0].generated, _GENERATED) for t, family in found.items()
            },
            keys={t: declared[t] for t, family in found.items() if not family[0].primary},
        )

    def shapes(self, settings: Mapping[str, str]) -> Mapping[str, TableShape]:
        """Columns that the log or the publication leave out are looked up, and each type."""
        with self._translated("reading the columns"):
            return shapes(self._connection, self._capture, self._names.identifier, settings)

    def table_states(self) -> tuple[int, Mapping[str, TableState]]:
        """Columns by number, and files of tables and partitions by oid."""
        tables = (list(self._capture.tables),)
        with self._translated("looking at the tables"):
            try:
                with self._connection.transaction():
                    # The size of a table that is being altered cannot be asked.
                    self._connection.execute("SET LOCAL lock_timeout = '500ms'")
                    rows = self._connection.execute(STATES.encode(), tables).fetchall()
            except psycopg.errors.LockNotAvailable:
                return 0, {}
        seen = max((row.pop("seen") for row in rows), default=0)
        return seen, {row.pop("name"): TableState(**row) for row in rows}

    def has_older_row(self, part: str, seen: int) -> bool:
        """Whether VACUUM FULL or CLUSTER, and not TRUNCATE, made a new file; takes at most 2 s."""
        named = "SELECT (%s::oid)::regclass::text AS name"
        older = "SELECT EXISTS (SELECT FROM ONLY {} WHERE age(xmin) > age(%s::xid)) AS found"
        try:
            with self._connection.transaction():
                # A statement that changes the table waits for the answer.
                self._connection.execute("SET LOCAL statement_timeout = '2s'")
                name = (self._one(named, part.partition(".")[0]) or {})["name"]
                return (self._one(older.format(name), str(seen % 2**32)) or {})["found"] is True
        except psycopg.Error:
            return False

    def inexact_columns(self) -> list[InexactColumn]:
        """Columns that Debezium does not carry as they are; a pass over tables with days."""
        with self._translated("reading the types of columns"):
            tables = (list(self._capture.tables),)
            # In the texts of constraints times are written in this zone.
            self._connection.execute("SET TIME ZONE 'UTC'")
            rows = self._connection.execute(POSTGRES_TYPES.encode(), tables).fetchall()
            return inexact_in_postgres(rows, partial(odd_days_in_postgres, self._connection))

    def check_condition(self, table: str, condition: str) -> None:
        """Have the server plan a query with the condition."""
        with self._translated(f"looking at the condition {condition}"):
            # The user's own text, run with the rights of the connector's user, as the connector
            # will run it.
            plan = sql.SQL("EXPLAIN SELECT FROM {} WHERE (").format(identifier(table))
            # A prepared statement cannot contain more than one statement.
            self._connection.execute(plan + sql.SQL(condition) + sql.SQL(")"), prepare=True)

    def identity(self) -> str:
        """The cluster's system identifier, which `initdb` makes."""
        with self._translated("asking which server it is"):
            row = self._one("SELECT system_identifier::text AS id FROM pg_control_system()")
        assert row is not None
        return f"system {row['id']}"

    def went_back(self, place: bytes, offset: Mapping[str, Any]) -> str | None:
        """Why the log cannot contain what was read: it ends before it."""
        with self._translated("asking where the log ends"):
            row = self._one(
                "SELECT pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN "
                "pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END, '0/0')::text AS lsn"
            )
        assert row is not None
        # The connector reads on while no captured table changes: its position is the later one.
        lsn = int(offset.get("lsn") or 0)
        if len(place) == 16:
            lsn = max(lsn, int.from_bytes(place[8:16], "big"))
        if int(row["lsn"]) >= lsn:
            return None
        return f"its log ends at {int(row['lsn']):,}, and {lsn:,} was read of it before"

    def log_end(self) -> None:
        """Nobody looks at its log: what is in it was committed as it is."""

    def read_mark(self) -> str | None:
        """The text in the table of signals."""
        table = self.own.signals
        with self._translated("reading our mark"):
            if self._one("SELECT to_regclass(%s) AS found", quoted(table)) == {"found": None}:
                return None
            read = sql.SQL("SELECT data FROM {} WHERE id = %s").format(identifier(table))
            row = self._connection.execute(read, (MARK,)).fetchone()
        return None if row is None else str(row["data"])

    def write_mark(self, text: str, instead_of: str | None) -> bool:
        """Write a text into the table of signals."""
        table = identifier(self.own.signals)
        with self._translated("writing our mark"):
            if instead_of is None:
                put = sql.SQL(
                    "INSERT INTO {} (id, type, data) VALUES (%s, 'log', %s) "
                    "ON CONFLICT (id) DO UPDATE SET data = excluded.data"
                ).format(table)
                return self._connection.execute(put, (MARK, text)).rowcount == 1
            change = sql.SQL("UPDATE {} SET data = %s WHERE id = %s AND data = %s").format(table)
            return self._connection.execute(change, (text, MARK, instead_of)).rowcount == 1

    def standing(self, offset: Mapping[str, Any]) -> ConnectorStanding:
        """Read the slot: whether a session uses it, and how much log the server keeps for it."""
        with self._translated("asking for the slot"):
            row = slot_row(self._connection, self._names.identifier)
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
        row = self._one(
            "SELECT since, name, advice FROM (SELECT prepared AS since, 'the prepared transaction '"
            " || quote_literal(gid) || ' of ' || owner AS name, '`ROLLBACK PREPARED ' || "
            "quote_literal(gid) || ';` or COMMIT in database ' || database || ' ends it' AS advice "
            "FROM pg_prepared_xacts UNION ALL SELECT xact_start, 'the transaction of process ' || "
            "pid || ' of ' || usename, '`SELECT pg_terminate_backend(' || pid || ');` ends it' "
            "FROM pg_stat_activity WHERE backend_xid IS NOT NULL) AS open "
            "ORDER BY since NULLS LAST LIMIT 1"
        )
        name = f"slot {self._names.identifier}"
        if row is None:
            return f"{name} is being made"
        return f"{name} waits for {row['name']}, open since {row['since']}: {row['advice']}"

    def signal(self, signal_id: str, kind: str, data: str) -> None:
        """Insert a signal into our table and delete it; the connector reads it from the log."""
        table = identifier(self.own.signals)
        insert = sql.SQL("INSERT INTO {} (id, type, data) VALUES (%s, %s, %s)").format(table)
        with self._translated("signalling"), self._connection.transaction():
            self._connection.execute(insert, (signal_id, kind, data))
            delete = sql.SQL("DELETE FROM {} WHERE id LIKE 'everstate-%'").format(table)
            self._connection.execute(delete)

    def condition(self, table: str, keys: Sequence[Key], *, is_raw: bool = False) -> str:
        """Condition on the key's columns, each value as a literal of its type."""
        mapping = self._capture.tables.get(table)
        declared = list(mapping.key_columns) if mapping else []
        with self._translated("reading the key"):
            columns = self._connection.execute(
                "SELECT a.attname AS name, format_type(a.atttypid, a.atttypmod) AS type "
                "FROM pg_attribute a LEFT JOIN pg_index i "
                "ON i.indrelid = a.attrelid AND i.indisprimary AND a.attnum = ANY (i.indkey) "
                "WHERE a.attrelid = to_regclass(%(table)s) AND CASE WHEN %(key)s::text[] = '{}' "
                "THEN i.indrelid IS NOT NULL ELSE a.attname = ANY (%(key)s) END "
                "ORDER BY array_position(%(key)s, a.attname::text), "
                "array_position(i.indkey::int2[], a.attnum)",
                {"table": quoted(table), "key": declared},
            ).fetchall()
            rows = [self._row_condition(table, columns, key, is_raw) for key in keys]
            found = sql.SQL(" OR ").join(rows)
            try:
                # A value that does not fit its column would make the connector fail.
                plan = sql.SQL("EXPLAIN SELECT FROM {} WHERE {}").format(identifier(table), found)
                self._connection.execute(plan)
            except psycopg.DataError as cause:
                reason = f"{table}: {_reason(cause)}"
                raise InvalidCapture(self._capture.name, reason) from cause
            return found.as_string(self._connection)

    def _row_condition(
        self, table: str, columns: Sequence[dict[str, Any]], key: Key, is_raw: bool
    ) -> sql.Composed:
        values = key_values(self._capture.name, table, [c["name"] for c in columns], key)
        parts = []
        for column, value in zip(columns, values, strict=True):
            try:
                given = from_raw(value, column["type"]) if is_raw else value
            except ValueError as cause:
                reason = f"{table}: {column['name']}: {cause}"
                raise InvalidCapture(self._capture.name, reason) from cause
            parts.append(
                sql.SQL("{} = {}::{}").format(
                    sql.Identifier(column["name"]), sql.Literal(given), sql.SQL(column["type"])
                )
            )
        return sql.SQL("({})").format(sql.SQL(" AND ").join(parts))

    def _make_schema(self) -> SetupStep:
        if self._one("SELECT FROM pg_namespace WHERE nspname = %s", POSTGRES_SCHEMA) is not None:
            return SetupStep(f"schema {POSTGRES_SCHEMA}", "there")
        self._connection.execute(
            sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(POSTGRES_SCHEMA))
        )
        return SetupStep(f"schema {POSTGRES_SCHEMA}", "made")

    def _make_table(self, table: str) -> SetupStep:
        if self._one("SELECT to_regclass(%s) AS found", quoted(table)) != {"found": None}:
            return SetupStep(f"table {table}", "there")
        self._connection.execute(create_table(table, self.own))
        return SetupStep(f"table {table}", "made")

    def _make_publication(self) -> list[SetupStep]:
        """Make the publication, or add the tables and the setting that it lacks."""
        name, wanted = self._names.identifier, published(self._capture, self.own)
        what, itself = f"publication {name}", sql.Identifier(name)
        row = self._one(
            "SELECT pubviaroot, pubinsert AND pubupdate AND pubdelete AND pubtruncate AS whole "
            "FROM pg_publication WHERE pubname = %s",
            name,
        )
        if row is None:
            self._connection.execute(create_publication(name, wanted))
            return [SetupStep(what, "made")]
        changed: set[str] = set()
        if not row["whole"]:
            alter = sql.SQL("ALTER PUBLICATION {} SET (publish = {})")
            self._connection.execute(alter.format(itself, sql.Literal(OPERATIONS)))
            changed.update(self._capture.tables)
        parted = [t for t, f in families(self._connection, wanted).items() if f[0].kind == "p"]
        if parted and not row["pubviaroot"]:
            alter = sql.SQL("ALTER PUBLICATION {} SET (publish_via_partition_root)")
            self._connection.execute(alter.format(itself))
            changed.update(parted)
        missing = set(wanted) - set(self._listed())
        if missing:
            tables = sql.SQL(", ").join(map(identifier, sorted(missing)))
            alter = sql.SQL("ALTER PUBLICATION {} ADD TABLE {}")
            self._connection.execute(alter.format(itself, tables))
            changed.update(missing)
        if not changed:
            return [SetupStep(what, "there")]
        return [self._published_late(what, table) for table in sorted(changed)]

    def _published_late(self, what: str, table: str) -> SetupStep:
        """The step for a table that was added; an existing slot has none of its earlier changes."""
        if table in self.own.tables or slot_row(self._connection, self._names.identifier) is None:
            return SetupStep(f"{what}, table {table}", "changed")
        read = f"`everstate cdc snapshot {self._capture.name} --table {table}`"
        note = f"what {table} has had so far was not captured: {read} reads its rows again"
        return SetupStep(f"{what}, table {table}", "changed", note, table)

    def _members(self) -> list[str]:
        """Tables that the publication lists by name, a partitioned table by its own name."""
        rows = self._connection.execute(
            "SELECT n.nspname || '.' || c.relname AS name FROM pg_publication p "
            "JOIN pg_publication_rel r ON r.prpubid = p.oid JOIN pg_class c ON c.oid = r.prrelid "
            "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE p.pubname = %s",
            (self._names.identifier,),
        ).fetchall()
        return [str(row["name"]) for row in rows]

    def _listed(self) -> list[str]:
        """Tables whose changes it publishes, also if it is for all tables, or those of a schema."""
        rows = self._connection.execute(
            "SELECT schemaname || '.' || tablename AS name FROM pg_publication_tables "
            "WHERE pubname = %s",
            (self._names.identifier,),
        ).fetchall()
        return [*self._members(), *(str(row["name"]) for row in rows)]

    def _drop_slot(self) -> bool:
        """Drop the slot; whether there was one."""
        name = self._names.identifier
        row = slot_row(self._connection, name)
        if row is None:
            return False
        if row["active"]:
            # The connector is gone; its session may need a moment to notice.
            self._connection.execute("SELECT pg_terminate_backend(%s, 5000)", (row["active_pid"],))
        # One that is still being made is gone with its session.
        drop = (
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots "
            "WHERE slot_name = %s"
        )
        self._connection.execute(drop, (name,))
        return True

    def _one(self, query: str, *arguments: object) -> dict[str, Any] | None:
        return self._connection.execute(query.encode(), arguments).fetchone()

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        """Translate PostgreSQL's errors into ours."""
        where = f"{self.address.host}:{self.address.port}/{self.address.database}"
        try:
            yield
        except (psycopg.OperationalError, psycopg.InterfaceError) as cause:
            reason = _reason(cause)
            raise Unavailable(
                f"{self._capture.name}: {doing}: PostgreSQL at {where}: {reason}."
            ) from cause
        except psycopg.Error as cause:
            reason = _reason(cause)
            raise CaptureFailed(
                f"{self._capture.name}: {doing}: PostgreSQL at {where} refuses: {reason}.",
                advice=f"`everstate cdc doctor {self._capture.name}` shows what is missing.",
            ) from cause


def published(capture: Capture, own: OwnTables) -> tuple[str, ...]:
    """Tables that the publication must have."""
    return (*capture.tables, *own.tables)


def _reason(error: psycopg.Error) -> str:
    """PostgreSQL's error message in one line, with its detail and hint."""
    told = error.diag.message_primary, error.diag.message_detail, error.diag.message_hint
    parts = [part for part in told if part] or [str(error).strip().partition("\n")[0]]
    return without_secret(" ".join(f"{part.rstrip('.')}." for part in parts)).rstrip(".")
