"""A captured PostgreSQL database: publication, slot, our two tables, and how the slot stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row

from everstate.errors import CaptureFailed, InvalidCapture, Unavailable
from everstate.sources.cdc.connectors import POSTGRES_SCHEMA, Address, OwnTables
from everstate.sources.cdc.database import (
    Finding,
    Key,
    Standing,
    Step,
    from_raw,
    key_values,
)
from everstate.sources.cdc.declaration import Capture
from everstate.sources.cdc.names import CaptureNames
from everstate.sources.cdc.postgres_checks import checks, create_table, identifier, quoted
from everstate.telemetry import without_secret

_CONNECT_S: Final = 10
Connection = psycopg.Connection[dict[str, Any]]


def postgres_address(dsn: str) -> tuple[Address, str]:
    """Address and password of a libpq connection string or URL; raises InvalidCapture."""
    try:
        parts = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
    except psycopg.ProgrammingError as cause:
        raise InvalidCapture("dsn", f"{without_secret(dsn)} is no connection string") from cause
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
    """A captured PostgreSQL database, spoken to as the connector's own user."""

    def __init__(self, capture: Capture, names: CaptureNames, dsn: str) -> None:
        self._capture, self._names = capture, names
        self.address, self._password = postgres_address(dsn)
        self.own = postgres_own(names)
        with self._translated("connecting"):
            self._connection: Connection = psycopg.connect(
                dsn,
                autocommit=True,
                row_factory=dict_row,
                application_name="everstate-cdc",
                connect_timeout=_CONNECT_S,
            )

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def prepare(self) -> list[Step]:
        """Make schema, our two tables and the publication; the connector makes the slot.

        Only a slot that is made together with its snapshot begins exactly where the snapshot
        ends, so that is left to the connector (decision 14).
        """
        with self._translated("preparing"):
            steps = [self._make_schema(), *map(self._make_table, self.own.tables)]
            steps.append(self._make_publication())
        return steps

    def remove(self) -> list[Step]:
        """Drop slot, publication and our two tables."""
        name = self._names.identifier
        with self._translated("removing"):
            steps = [self._drop_slot()]
            had = self._one("SELECT FROM pg_publication WHERE pubname = %s", name) is not None
            if had:
                self._connection.execute(
                    sql.SQL("DROP PUBLICATION {}").format(sql.Identifier(name))
                )
            steps.append(Step(f"publication {name}", "removed" if had else "there"))
            for table in self.own.tables:
                self._connection.execute(
                    sql.SQL("DROP TABLE IF EXISTS {}").format(identifier(table))
                )
                steps.append(Step(f"table {table}", "removed"))
        return steps

    def check(self) -> list[Finding]:
        """Look at settings, rights, publication, slot, identities and our tables."""
        with self._translated("checking"):
            return checks(self._connection, self._capture, self._names, self.own)

    def standing(self, offset: Mapping[str, Any]) -> Standing:
        """Read the slot: whether a session uses it, and what the server holds for it."""
        with self._translated("asking for the slot"):
            row = self._one(
                "SELECT active, wal_status, coalesce(invalidation_reason, '') AS reason, "
                "pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::bigint AS behind, "
                "pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint AS held "
                "FROM pg_replication_slots WHERE slot_name = %s"
                if self._connection.info.server_version >= 170000
                else "SELECT active, wal_status, '' AS reason, "
                "pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::bigint AS behind, "
                "pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint AS held "
                "FROM pg_replication_slots WHERE slot_name = %s",
                self._names.identifier,
            )
        if row is None:
            # Without a place a first snapshot is to come, and its slot with it.
            missing = f"there is no slot {self._names.identifier}"
            return Standing(False, None, None, missing, is_lost=bool(offset))
        lost = row["wal_status"] == "lost"
        note = f"the slot is lost ({row['reason'] or 'its log was removed'})" if lost else None
        return Standing(bool(row["active"]), row["behind"], row["held"], note, is_lost=lost)

    def signal(self, signal_id: str, kind: str, data: str) -> None:
        """Put a signal into our table."""
        insert = sql.SQL("INSERT INTO {} (id, type, data) VALUES (%s, %s, %s)")
        with self._translated("signalling"):
            self._connection.execute(
                insert.format(identifier(self.own.signals)), (signal_id, kind, data)
            )

    def condition(self, table: str, keys: Sequence[Key], *, is_raw: bool = False) -> str:
        """Condition on the primary key's columns, each value as a literal of its type."""
        with self._translated("reading the primary key"):
            columns = self._connection.execute(
                "SELECT a.attname AS name, format_type(a.atttypid, a.atttypmod) AS type "
                "FROM pg_index i JOIN pg_attribute a "
                "ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey) "
                "WHERE i.indrelid = to_regclass(%s) AND i.indisprimary "
                "ORDER BY array_position(i.indkey::int2[], a.attnum)",
                (quoted(table),),
            ).fetchall()
            rows = [self._row_condition(table, columns, key, is_raw) for key in keys]
            found = sql.SQL(" OR ").join(rows)
            try:
                # What cannot be a value of its column would make the connector fail.
                plan = sql.SQL("EXPLAIN SELECT FROM {} WHERE {}").format(identifier(table), found)
                self._connection.execute(plan)
            except psycopg.DataError as cause:
                reason = f"{table}: {_first_line(cause)}"
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

    def _make_schema(self) -> Step:
        if self._one("SELECT FROM pg_namespace WHERE nspname = %s", POSTGRES_SCHEMA) is not None:
            return Step(f"schema {POSTGRES_SCHEMA}", "there")
        self._connection.execute(
            sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(POSTGRES_SCHEMA))
        )
        return Step(f"schema {POSTGRES_SCHEMA}", "made")

    def _make_table(self, table: str) -> Step:
        if self._one("SELECT to_regclass(%s) AS found", quoted(table)) != {"found": None}:
            return Step(f"table {table}", "there")
        self._connection.execute(create_table(table, self.own))
        return Step(f"table {table}", "made")

    def _make_publication(self) -> Step:
        name, wanted = self._names.identifier, published(self._capture, self.own)
        what = f"publication {name}"
        if self._one("SELECT FROM pg_publication WHERE pubname = %s", name) is None:
            tables = sql.SQL(", ").join(map(identifier, wanted))
            self._connection.execute(
                sql.SQL("CREATE PUBLICATION {} FOR TABLE {}").format(sql.Identifier(name), tables)
            )
            return Step(what, "made")
        rows = self._connection.execute(
            "SELECT schemaname || '.' || tablename AS name FROM pg_publication_tables "
            "WHERE pubname = %s",
            (name,),
        ).fetchall()
        missing = set(wanted) - {row["name"] for row in rows}
        if not missing:
            return Step(what, "there")
        tables = sql.SQL(", ").join(map(identifier, sorted(missing)))
        self._connection.execute(
            sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(sql.Identifier(name), tables)
        )
        return Step(what, "changed")

    def _drop_slot(self) -> Step:
        name = self._names.identifier
        row = self._one(
            "SELECT active, active_pid FROM pg_replication_slots WHERE slot_name = %s", name
        )
        if row is None:
            return Step(f"slot {name}", "there")
        if row["active"]:
            # The connector is gone; its session may need a moment to notice.
            self._connection.execute("SELECT pg_terminate_backend(%s, 5000)", (row["active_pid"],))
        self._connection.execute("SELECT pg_drop_replication_slot(%s)", (name,))
        return Step(f"slot {name}", "removed")

    def _one(self, query: str, *arguments: object) -> dict[str, Any] | None:
        return self._connection.execute(query.encode(), arguments).fetchone()

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        """Turn what PostgreSQL says into errors of ours."""
        where = f"{self.address.host}:{self.address.port}/{self.address.database}"
        try:
            yield
        except (psycopg.OperationalError, psycopg.InterfaceError) as cause:
            reason = _first_line(cause)
            raise Unavailable(
                f"{self._capture.name}: {doing}: PostgreSQL at {where}: {reason}."
            ) from cause
        except psycopg.Error as cause:
            reason = _first_line(cause)
            raise CaptureFailed(
                f"{self._capture.name}: {doing}: PostgreSQL at {where} refuses: {reason}.",
                advice=f"`everstate cdc doctor {self._capture.name}` shows what is missing.",
            ) from cause


def published(capture: Capture, own: OwnTables) -> tuple[str, ...]:
    """Tables that the publication must have."""
    return (*capture.tables, *own.tables)


def _first_line(error: psycopg.Error) -> str:
    return without_secret(str(error)).strip().partition("\n")[0].rstrip(".")
