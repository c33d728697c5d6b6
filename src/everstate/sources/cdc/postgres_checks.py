"""What the doctor looks at in a captured PostgreSQL database, and the SQL that mends it."""

from __future__ import annotations

from typing import Any, Final

import psycopg
from psycopg import sql

from everstate.sources.cdc.connectors import POSTGRES_SCHEMA, OwnTables
from everstate.sources.cdc.database import Finding
from everstate.sources.cdc.declaration import Capture
from everstate.sources.cdc.names import CaptureNames

_VERSION_MIN: Final = 130_000
_HELD_BYTES_WARN: Final = 1_000_000_000
_RIGHTS: Final = {"own": ("SELECT", "INSERT", "UPDATE", "DELETE"), "captured": ("SELECT",)}
_IDENTITIES: Final = {"d": "default", "n": "nothing", "f": "full", "i": "index"}

Connection = psycopg.Connection[dict[str, Any]]


def checks(
    connection: Connection, capture: Capture, names: CaptureNames, own: OwnTables
) -> list[Finding]:
    """Everything that the connector needs; a few round trips, nothing is changed."""
    looked = _Checks(connection, capture, names, own)
    return [
        looked.version(),
        looked.wal_level(),
        looked.room("max_replication_slots", "pg_replication_slots"),
        looked.room("max_wal_senders", "pg_stat_replication"),
        looked.role(),
        *looked.tables(),
        looked.publication(),
        looked.slot(),
        *looked.own_tables(),
    ]


class _Checks:
    def __init__(
        self, connection: Connection, capture: Capture, names: CaptureNames, own: OwnTables
    ) -> None:
        self._connection = connection
        self._capture, self._names, self._own = capture, names, own
        self._user = str(self._one("SELECT current_user AS name")["name"])

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
        if used < limit or self._slot_row() is not None:
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
        for table in self._capture.tables:
            row = self._table(table)
            if row is None:
                findings.append(
                    Finding(f"table {table}", "fail", "there is none of that name",
                            advice="Correct the declaration, or make the table.")
                )  # fmt: skip
                continue
            findings += [self._rights(table, "captured"), self._key(table, row)]
            findings.append(self._identity(table, str(row["identity"])))
        return findings

    def publication(self) -> Finding:
        name = self._names.identifier
        wanted = [*self._capture.tables, *self._own.tables]
        row = self._maybe(
            "SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate AS whole, puballtables "
            "FROM pg_publication WHERE pubname = %s",
            name,
        )
        what, itself = f"publication {name}", sql.Identifier(name)
        if row is None:
            tables = sql.SQL(", ").join(map(identifier, wanted))
            statement = self._sql("CREATE PUBLICATION {} FOR TABLE {};", itself, tables)
            return Finding(what, "fail", "there is none", (*self._makings(), statement))
        if not row["whole"]:
            kinds = "insert, update, delete, truncate"
            statement = self._sql(f"ALTER PUBLICATION {{}} SET (publish = '{kinds}');", itself)
            return Finding(what, "fail", "it does not publish every kind of change", (statement,))
        listed = self._connection.execute(
            "SELECT schemaname || '.' || tablename AS name, "
            "coalesce(rowfilter, '') <> '' AS filtered FROM pg_publication_tables "
            "WHERE pubname = %s"
            if self._connection.info.server_version >= 150_000
            else "SELECT schemaname || '.' || tablename AS name, false AS filtered "
            "FROM pg_publication_tables WHERE pubname = %s",
            (name,),
        ).fetchall()
        missing = sorted(set(wanted) - {each["name"] for each in listed})
        if missing:
            tables = sql.SQL(", ").join(map(identifier, missing))
            statement = self._sql("ALTER PUBLICATION {} ADD TABLE {};", itself, tables)
            return Finding(what, "fail", f"it lacks {', '.join(missing)}", (statement,))
        filtered = sorted(each["name"] for each in listed if each["filtered"])
        if filtered:
            return Finding(what, "warn", f"it leaves out rows of {', '.join(filtered)}")
        return Finding(what, "ok", f"has {len(wanted)} tables")

    def slot(self) -> Finding:
        name = self._names.identifier
        row = self._slot_row()
        if row is None:
            advice = f"`everstate cdc add {self._capture.name}` makes the connector, which makes it"
            return Finding(f"slot {name}", "fail", "there is none", advice=advice)
        held = int(row["held"] or 0)
        if row["wal_status"] == "lost":
            return Finding(
                f"slot {name}", "fail", "it is lost: the server removed log it needed",
                (f"SELECT pg_drop_replication_slot('{name}');",),
                f"Then `everstate cdc remove {self._capture.name} --drop` and add it again: "
                "rows are read anew, versions go on.",
            )  # fmt: skip
        found = f"{'in use' if row['active'] else 'nobody reads it'}, holds {held / 1e6:,.1f} MB"
        if not row["active"]:
            advice = f"`everstate cdc status {self._capture.name}` tells why"
            return Finding(f"slot {name}", "fail", found, advice=advice)
        if held > _HELD_BYTES_WARN:
            return Finding(f"slot {name}", "warn", found, advice="Look for what keeps it behind.")
        if self._setting("max_slot_wal_keep_size") == "-1":
            # A choice that is the database's owner's: hold without end, or lose the slot.
            return Finding(f"slot {name}", "ok", f"{found}; the server would hold without limit")
        return Finding(f"slot {name}", "ok", found)

    def own_tables(self) -> list[Finding]:
        findings = []
        for table in self._own.tables:
            if self._table(table) is None:
                statements = tuple(s for s in self._makings() if table in s or "SCHEMA" in s)
                findings.append(Finding(f"table {table}", "fail", "there is none", statements))
            else:
                findings.append(self._rights(table, "own"))
        return findings

    def _makings(self) -> tuple[str, ...]:
        """Statements that make what of ours is missing, for the connector's user to use."""
        schema, user = sql.Identifier(POSTGRES_SCHEMA), sql.Identifier(self._user)
        statements = [
            self._sql("CREATE SCHEMA IF NOT EXISTS {};", schema),
            self._sql("GRANT USAGE ON SCHEMA {} TO {};", schema, user),
        ]
        for table in self._own.tables:
            if self._table(table) is None:
                rights = sql.SQL(", ").join(map(sql.SQL, _RIGHTS["own"]))
                statements += [
                    create_table(table, self._own).as_string(self._connection) + ";",
                    self._sql("GRANT {} ON {} TO {};", rights, identifier(table), user),
                ]
        return tuple(statements)

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

    def _key(self, table: str, row: dict[str, Any]) -> Finding:
        if row["keyed"]:
            return Finding(f"key of {table}", "ok", "it has a primary key")
        columns = self._capture.tables[table].key_columns
        listed = sql.SQL(", ").join(map(sql.Identifier, columns or ("id",)))
        statement = self._sql("ALTER TABLE {} ADD PRIMARY KEY ({});", identifier(table), listed)
        return Finding(f"key of {table}", "fail", "there is no primary key", (statement,))

    def _identity(self, table: str, identity: str) -> Finding:
        name, found = f"identity of {table}", _IDENTITIES[identity]
        if identity == "f":
            return Finding(name, "ok", found)
        statement = self._sql("ALTER TABLE {} REPLICA IDENTITY FULL;", identifier(table))
        if identity == "n":
            return Finding(name, "fail", f"{found}: deletes would not be told", (statement,))
        # Rows are completed from our own latest state, as far as it goes.
        advice = "The row before is not told; it is completed from the entity's last version."
        return Finding(name, "warn", found, (statement,), advice)

    def _slot_row(self) -> dict[str, Any] | None:
        return self._maybe(
            "SELECT active, wal_status, "
            "pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint AS held "
            "FROM pg_replication_slots WHERE slot_name = %s",
            self._names.identifier,
        )

    def _table(self, table: str) -> dict[str, Any] | None:
        """Replica identity and key of a table; None when there is none of that name."""
        return self._maybe(
            "SELECT c.relreplident::text AS identity, EXISTS (SELECT FROM pg_index i "
            "WHERE i.indrelid = c.oid AND i.indisprimary) AS keyed "
            "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = split_part(%s, '.', 1) "
            "AND c.relname = substr(%s, strpos(%s, '.') + 1) AND c.relkind IN ('r', 'p')",
            table,
            table,
            table,
        )

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


def create_table(table: str, own: OwnTables) -> sql.Composed:
    """The statement that makes one of our two tables."""
    columns = (
        "id text PRIMARY KEY, type text NOT NULL, data text"
        if table == own.signals
        else "source text PRIMARY KEY, at timestamptz NOT NULL"
    )
    return sql.SQL("CREATE TABLE {} ({})").format(identifier(table), sql.SQL(columns))


def identifier(table: str) -> sql.Identifier:
    """``schema.table`` as SQL."""
    return sql.Identifier(*table.split(".", 1))


def quoted(table: str) -> str:
    """``schema.table`` as text that `regclass` reads."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in table.split(".", 1))
