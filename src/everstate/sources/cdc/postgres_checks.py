"""The doctor's checks of a captured PostgreSQL database, with the SQL that repairs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from psycopg import sql

from everstate.declarations.captures import Capture
from everstate.sources.cdc.connectors import POSTGRES_SCHEMA, OwnTables
from everstate.sources.cdc.database import Finding
from everstate.sources.cdc.names import CaptureNames
from everstate.sources.cdc.postgres_tables import (
    COLUMN_LISTS,
    CapturedConnection,
    TableChecks,
    families,
    identifier,
    published_whole,
)

_VERSION_MIN: Final = 130_000
_HELD_BYTES_WARN: Final = 1_000_000_000
OPERATIONS: Final = "insert, update, delete, truncate"
"""Kinds of changes that a capture's publication has."""
_RIGHTS: Final = {"own": ("SELECT", "INSERT", "UPDATE", "DELETE"), "captured": ("SELECT",)}


def checks(
    connection: CapturedConnection, capture: Capture, names: CaptureNames, own: OwnTables
) -> list[Finding]:
    """Check everything that the connector needs; a few round trips, nothing is changed."""
    looked = _Checks(connection, capture, names, own)
    return [
        looked.version(),
        looked.wal_level(),
        looked.room("max_replication_slots", "pg_replication_slots"),
        looked.room("max_wal_senders", "pg_stat_replication"),
        looked.role(),
        *looked.tables(),
        *looked.own_tables(),
        looked.publication(),
    ]


def check_slot(
    connection: CapturedConnection, capture: Capture, names: CaptureNames, own: OwnTables
) -> Finding:
    """Check the connector's slot only."""
    return _Checks(connection, capture, names, own).slot()


def check_tables(
    connection: CapturedConnection, capture: Capture, names: CaptureNames, own: OwnTables
) -> list[Finding]:
    """Check the captured tables only."""
    return _Checks(connection, capture, names, own).tables()


class _Checks:
    def __init__(
        self, connection: CapturedConnection, capture: Capture, names: CaptureNames, own: OwnTables
    ) -> None:
        self._connection = connection
        self._capture, self._names, self._own = capture, names, own
        self._user = str(self._one("SELECT current_user AS name")["name"])
        self._families = families(connection, capture.tables)

    def version(self) -> Finding:
        number = self._connection.info.server_version
        found = f"{number // 10_000}.{number % 10_000}"
        if number >= _VERSION_MIN:
            return Finding("version", "ok", found)
        return Finding("version", "fail", found, advice="Use PostgreSQL 13 or newer.")

    def wal_level(self) -> Finding:
        found = self._setting("wal_level")
        if found == "logical":
            return Finding("wal_level", "ok", found)
        statement = "ALTER SYSTEM SET wal_level = 'logical';"
        return Finding("wal_level", "fail", found, (statement,), "Then restart the server.")

    def room(self, setting: str, used_by: str) -> Finding:
        limit = int(self._setting(setting))
        count = sql.SQL("SELECT count(*) AS n FROM {}").format(sql.Identifier(used_by))
        row = self._connection.execute(count).fetchone()
        used = int(row["n"]) if row else 0
        found = f"{used} of {limit} used"
        if used < limit or slot_row(self._connection, self._names.identifier):
            return Finding(setting, "ok", found)
        wanted = max(10, limit * 2)
        statement = f"ALTER SYSTEM SET {setting} = {wanted};"
        return Finding(setting, "fail", found, (statement,), "Then restart the server.")

    def role(self) -> Finding:
        row = self._one(
            "SELECT rolsuper OR rolreplication OR EXISTS (SELECT FROM pg_roles m WHERE m.rolname "
            "IN ('rds_replication', 'cloudsqlsuperuser') AND pg_has_role(r.oid, m.oid, 'MEMBER')) "
            "AS may FROM pg_roles r WHERE rolname = current_user"
        )
        if row["may"]:
            return Finding("replication", "ok", f"{self._user} may replicate")
        statement = self._sql("ALTER ROLE {} REPLICATION;", sql.Identifier(self._user))
        return Finding("replication", "fail", f"{self._user} may not replicate", (statement,))

    def tables(self) -> list[Finding]:
        findings: list[Finding] = []
        checked = TableChecks(self._connection, self._capture, self._families)
        for table in self._capture.tables:
            if table not in self._families:
                findings.append(
                    Finding(f"table {table}", "fail", "there is none of that name",
                            advice="Correct the declaration, or make the table.")
                )  # fmt: skip
                continue
            findings += [self._rights(table, "captured"), *checked.of(table)]
        return [*findings, *self._hidden(), *self._filters()]

    def _hidden(self) -> list[Finding]:
        """Tables of which row security hides rows from a snapshot; the log has them all."""
        roots = {family[0].oid: table for table, family in self._families.items()}
        rows = self._connection.execute(
            "SELECT oid FROM unnest(%s::oid[]) AS oid WHERE row_security_active(oid) ORDER BY oid",
            (list(roots),),
        ).fetchall()
        statement = self._sql("ALTER ROLE {} BYPASSRLS;", sql.Identifier(self._user))
        found = f"row security holds for {self._user}: a snapshot lacks what a policy hides"
        return [
            Finding(f"row security of {roots[row['oid']]}", "fail", found, (statement,))
            for row in rows
        ]

    def _filters(self) -> list[Finding]:
        """Tables of which the publication leaves out rows, which a snapshot reads nevertheless."""
        name = self._names.identifier
        if self._connection.info.server_version < COLUMN_LISTS:
            return []
        rows = self._connection.execute(
            "SELECT schemaname || '.' || tablename AS name, rowfilter FROM pg_publication_tables "
            "WHERE pubname = %s AND rowfilter IS NOT NULL",
            (name,),
        ).fetchall()
        return [
            Finding(
                f"rows of {row['name']}",
                "fail",
                f"publication {name} leaves out those without {row['rowfilter']}",
                tuple(
                    each.as_string(self._connection) for each in published_whole(name, row["name"])
                ),
            )
            for row in rows
            if row["name"] in self._families
        ]

    def _is_newer_than_slot(self) -> bool:
        """Whether the publication and all its tables are newer than what the idle slot has read.

        The connector then reads nothing: the publication is looked up as it was at that place.
        """
        row = self._maybe(
            "SELECT bool_and(age(p.xmin) < age(s.catalog_xmin) "
            "AND age(r.xmin) < age(s.catalog_xmin)) AS is_newer "
            "FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid, "
            "pg_replication_slots s "
            "WHERE p.pubname = %s AND s.slot_name = p.pubname AND NOT s.active",
            self._names.identifier,
        )
        return row is not None and bool(row["is_newer"])

    def publication(self) -> Finding:
        name = self._names.identifier
        wanted = [*self._capture.tables, *self._own.tables]
        row = self._maybe(
            "SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate AS whole, pubviaroot "
            "FROM pg_publication WHERE pubname = %s",
            name,
        )
        what, itself = f"publication {name}", sql.Identifier(name)
        if row is None:
            made = create_publication(name, wanted).as_string(self._connection) + ";"
            return Finding(what, "fail", "there is none", (made,))
        if not row["whole"]:
            text = "ALTER PUBLICATION {} SET (publish = {});"
            statement = self._sql(text, itself, sql.Literal(OPERATIONS))
            return Finding(what, "fail", "it does not publish every kind of change", (statement,))
        parted = sorted(t for t, family in self._families.items() if family[0].kind == "p")
        if parted and not row["pubviaroot"]:
            # The connector's settings do not list the names of the partitions.
            found = f"it publishes changes of {', '.join(parted)} under the names of the partitions"
            statement = self._sql("ALTER PUBLICATION {} SET (publish_via_partition_root);", itself)
            return Finding(what, "fail", found, (statement,))
        listed = self._connection.execute(
            "SELECT schemaname || '.' || tablename AS name FROM pg_publication_tables "
            "WHERE pubname = %s",
            (name,),
        ).fetchall()
        missing = sorted(set(wanted) - {each["name"] for each in listed})
        if missing:
            tables = sql.SQL(", ").join(map(identifier, missing))
            statement = self._sql("ALTER PUBLICATION {} ADD TABLE {};", itself, tables)
            return Finding(what, "fail", f"it lacks {', '.join(missing)}", (statement,))
        if self._is_newer_than_slot():
            found = "it was made anew, and the connector cannot read the log from before that"
            advice = (
                f"`everstate cdc snapshot {self._capture.name} --new-epoch` reads all rows anew."
            )
            return Finding(what, "fail", found, advice=advice)
        return Finding(what, "ok", f"has {len(wanted)} tables")

    def slot(self) -> Finding:
        name = self._names.identifier
        row = slot_row(self._connection, name)
        again = f"`everstate cdc snapshot {self._capture.name} --new-epoch`"
        if row is None:
            advice = (
                f"`everstate cdc add {self._capture.name}` makes the connector, which makes it; "
                f"where there is a connector already, {again} makes both anew."
            )
            return Finding(f"slot {name}", "fail", "there is none", advice=advice)
        held = int(row["held"] or 0)
        if (lost := lost_slot(row, {})) is not None:
            return Finding(f"slot {name}", "fail", lost, advice=f"{again} reads all rows anew.")
        found = f"{'in use' if row['active'] else 'nobody reads it'}, holds {held / 1e6:,.1f} MB"
        if not row["active"]:
            advice = f"`everstate cdc status {self._capture.name}` shows why"
            return Finding(f"slot {name}", "fail", found, advice=advice)
        if held > _HELD_BYTES_WARN:
            return Finding(f"slot {name}", "warn", found, advice="Look for what keeps it behind.")
        if self._setting("max_slot_wal_keep_size") == "-1":
            # The database's owner has to choose: keep log without limit, or risk losing the slot.
            return Finding(f"slot {name}", "ok", f"{found}; the server would hold without limit")
        return Finding(f"slot {name}", "ok", found)

    def own_tables(self) -> list[Finding]:
        schema, user = sql.Identifier(POSTGRES_SCHEMA), sql.Identifier(self._user)
        query = "SELECT FROM pg_namespace WHERE nspname = %s"
        making: list[str] = []
        if self._maybe(query, POSTGRES_SCHEMA) is None:
            making.append(self._sql("CREATE SCHEMA IF NOT EXISTS {};", schema))
            making.append(self._sql("GRANT USAGE ON SCHEMA {} TO {};", schema, user))
        findings = []
        for table in self._own.tables:
            if self._table(table):
                findings.append(self._rights(table, "own"))
                continue
            rights = sql.SQL(", ").join(map(sql.SQL, _RIGHTS["own"]))
            making += [
                create_table(table, self._own).as_string(self._connection) + ";",
                self._sql("GRANT {} ON {} TO {};", rights, identifier(table), user),
            ]
            findings.append(Finding(f"table {table}", "fail", "there is none", tuple(making)))
            making = []
        return findings

    def _rights(self, table: str, kind: str) -> Finding:
        wanted = _RIGHTS[kind]
        schema = table.partition(".")[0]
        name = f"rights on {table}"
        row = self._one("SELECT has_schema_privilege(%s, 'USAGE') AS may", schema)
        missing = [
            right
            for right in wanted
            if not row["may"]
            or not self._one(
                "SELECT has_table_privilege(%s::regclass, %s) AS may", quoted(table), right
            )["may"]
        ]
        if not missing:
            return Finding(name, "ok", ", ".join(wanted))
        user = sql.Identifier(self._user)
        rights = sql.SQL(", ").join(map(sql.SQL, missing))
        statements = [self._sql("GRANT {} ON {} TO {};", rights, identifier(table), user)]
        if not row["may"]:
            grant = "GRANT USAGE ON SCHEMA {} TO {};"
            statements.insert(0, self._sql(grant, sql.Identifier(schema), user))
        found = f"{self._user} lacks {', '.join(missing)}"
        return Finding(name, "fail", found, tuple(statements))

    def _table(self, table: str) -> bool:
        """Whether there is a table of that name."""
        found = self._maybe(
            "SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname || '.' || c.relname = %s AND c.relkind IN ('r', 'p')",
            table,
        )
        return found is not None

    def _setting(self, name: str) -> str:
        return str(self._one("SELECT current_setting(%s) AS value", name)["value"])

    def _one(self, query: str, *arguments: object) -> dict[str, Any]:
        row = self._maybe(query, *arguments)
        assert row is not None, query
        return row

    def _maybe(self, query: str, *arguments: object) -> dict[str, Any] | None:
        return self._connection.execute(query.encode(), arguments).fetchone()

    def _sql(self, text: str, *parts: sql.Composable) -> str:
        """One statement as text, names quoted where they must be."""
        return sql.SQL(text).format(*parts).as_string(self._connection)


def slot_row(connection: CapturedConnection, name: str) -> dict[str, Any] | None:
    """A slot as the server has it, places and sizes in bytes of its log; ``None``: there is none.

    ``end``: up to where its reader has confirmed the log; None while the slot is being made.
    """
    return connection.execute(
        "SELECT active, active_pid, wal_status, "
        "coalesce(to_jsonb(s) ->> 'invalidation_reason', '') AS reason, "
        "pg_wal_lsn_diff(confirmed_flush_lsn, '0/0')::bigint AS end, "
        "pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::bigint AS behind, "
        "pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint AS held "
        "FROM pg_replication_slots s WHERE slot_name = %s",
        (name,),
    ).fetchone()


def lost_slot(row: Mapping[str, Any], offset: Mapping[str, Any]) -> str | None:
    """Why the server does not send all that a connector has still to read; ``None``: it does.

    ``offset``: its stored position. The server sends nothing from before the slot's place. While a
    session reads the slot, that place may be ahead: Connect stores a position after its records.
    """
    if row["wal_status"] == "lost":
        return f"the slot is lost ({row['reason'] or 'its log was removed'})"
    read = max(int(offset.get(name) or 0) for name in ("lsn", "lsn_proc", "lsn_commit"))
    if row["active"] or not read or int(row["end"] or 0) <= read:
        return None
    return (
        f"the slot is at {int(row['end']):,} of the log, and the connector has read to {read:,}: "
        "another session read the slot or made it anew, so the changes between are missing"
    )


def create_table(table: str, own: OwnTables) -> sql.Composed:
    """The statement that makes one of our two tables."""
    columns = (
        "id text PRIMARY KEY, type text NOT NULL, data text"
        if table == own.signals
        else "source text PRIMARY KEY, at timestamptz NOT NULL"
    )
    return sql.SQL("CREATE TABLE {} ({})").format(identifier(table), sql.SQL(columns))


def create_publication(name: str, tables: Iterable[str]) -> sql.Composed:
    """The statement that makes a capture's publication.

    Changes of partitions are published as changes of the partitioned table, which is captured.
    """
    listed = sql.SQL(", ").join(map(identifier, tables))
    return sql.SQL("CREATE PUBLICATION {} FOR TABLE {} WITH (publish_via_partition_root)").format(
        sql.Identifier(name), listed
    )


def quoted(table: str) -> str:
    """``schema.table`` as text that `regclass` reads."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in table.split(".", 1))
