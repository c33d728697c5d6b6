"""Points a name that readers use to another version: short, retried, and grants stay (V13).

CREATE OR REPLACE VIEW waits for readers, and other readers queue behind it, so each try gives up
after 200 ms. It cannot drop or retype columns: then the name is dropped and created again with all
that others have set on it (owner, options, grants, comments), unless another database view depends
on it.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final

import psycopg

from everstate.errors import PublishRefused
from everstate.postgres import Connection, identifier, literal

LOCK_MS: Final = 200
_GRANTED: Final = (
    "CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END, "
    "privilege_type, is_grantable"
)
_GRANTS: Final = (
    f"SELECT NULL, {_GRANTED} FROM pg_class, "
    "aclexplode(coalesce(relacl, acldefault('r', relowner))) "
    "WHERE oid = %(view)s::regclass UNION ALL "
    f"SELECT attname::text, {_GRANTED} FROM pg_attribute, aclexplode(attacl) "
    "WHERE attrelid = %(view)s::regclass AND NOT attisdropped"
)


class ReaderName:
    """A name that readers use: a database view over the table of a version."""

    def __init__(self, connection: Connection, schema_name: str, name: str) -> None:
        self._connection, self._name = connection, name
        self._schema, self._view = identifier(schema_name), identifier(schema_name, name)

    def point(self, query: str) -> None:
        """Make the name show a query, in the caller's transaction; nothing if it already does.

        Raises PublishRefused with the names of views that depend on a column that would be dropped,
        and psycopg's LockNotAvailable when a reader holds a lock.
        """
        shows = sha256(query.encode()).hexdigest()
        if self._shows() == shows:
            return
        self._run(f"SET LOCAL lock_timeout = {LOCK_MS}; SAVEPOINT point")
        try:
            self._run(f"CREATE OR REPLACE VIEW {self._view} AS {query}")
        except psycopg.errors.InvalidTableDefinition:
            self._run("ROLLBACK TO SAVEPOINT point")
            self._make_again(query)
        self._rows(
            f"INSERT INTO {self._schema}.reader_name (name, relation, shows) "
            "VALUES (%(name)s, %(view)s::regclass, %(shows)s) ON CONFLICT (name) DO UPDATE "
            "SET relation = excluded.relation, shows = excluded.shows",
            shows=shows,
        )
        self._run("SET LOCAL lock_timeout = 0")

    def drop(self) -> None:
        """Drop the name; raises PublishRefused when a view depends on it."""
        self._run(f"SET LOCAL lock_timeout = {LOCK_MS}")
        if dependents := self._dependents():
            raise PublishRefused(self._name, dependents, is_dropped=True)
        self._drop(is_dropped=True)
        self._run("SET LOCAL lock_timeout = 0")

    def columns(self) -> list[str]:
        """Columns that readers see under the name, in their order; empty: it does not exist."""
        rows = self._rows(
            "SELECT attname::text FROM pg_attribute WHERE attnum > 0 AND NOT attisdropped "
            "AND attrelid = to_regclass(%(view)s) ORDER BY attnum"
        )
        return [column for (column,) in rows]

    def holders(self) -> list[str]:
        """Other sessions that hold a lock on the name, the oldest first."""
        rows = self._rows(
            "SELECT DISTINCT ON (xact_start, pid) pid, "
            "coalesce(nullif(application_name, ''), usename, '?') "
            "FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE granted "
            "AND pid <> pg_backend_pid() AND relation = to_regclass(%(view)s) "
            "ORDER BY xact_start, pid"
        )
        return [f"{application} (process {pid})" for pid, application in rows]

    def _shows(self) -> str | None:
        """The hash of the query that the name shows; ``None``: it was not made here, or is not."""
        row = self._rows(
            f"SELECT shows FROM {self._schema}.reader_name WHERE name = %(name)s "
            "AND relation = to_regclass(%(view)s)"
        ).fetchone()
        return None if row is None else row[0]

    def _comments(self) -> list[tuple[str | None, str]]:
        """Comments on the name (``None``) and on its columns."""
        return self._rows(
            "SELECT attname::text, description FROM pg_description LEFT JOIN pg_attribute "
            "ON attrelid = objoid AND attnum = objsubid AND objsubid > 0 "
            "WHERE classoid = 'pg_class'::regclass AND objoid = to_regclass(%(view)s) "
            "ORDER BY objsubid"
        ).fetchall()

    def _drop(self, *, is_dropped: bool = False) -> None:
        """Drop the name; raises PublishRefused when anything but a view depends on it, too."""
        try:
            with self._connection.transaction():
                self._run(f"DROP VIEW IF EXISTS {self._view}")
        except psycopg.errors.DependentObjectsStillExist as cause:
            # Such as a SQL function, or a table with a column of the view's row type.
            found = (cause.diag.message_detail or str(cause)).splitlines()
            named = [line.partition(" depends on")[0] for line in found]
            raise PublishRefused(self._name, named, is_dropped=is_dropped) from cause

    def _make_again(self, query: str) -> None:
        """Drop the name and create it again, with all that others have set on it."""
        if dependents := self._dependents():
            raise PublishRefused(self._name, dependents)
        ((owner, options),) = self._rows(
            "SELECT pg_get_userbyid(relowner), coalesce(reloptions, '{}') FROM pg_class "
            "WHERE oid = %(view)s::regclass"
        ).fetchall()
        grants, comments = self._rows(_GRANTS).fetchall(), self._comments()
        self._drop()
        self._run(f"CREATE VIEW {self._view} AS {query}")
        self._run(f"ALTER VIEW {self._view} OWNER TO {identifier(owner)}")
        for option in options:
            self._run(f"ALTER VIEW {self._view} SET ({option})")
        known = self.columns()
        for column, text in comments:
            if column is None or column in known:
                of = f"VIEW {self._view}"
                if column is not None:
                    of = f"COLUMN {self._view}.{identifier(column)}"
                self._run(f"COMMENT ON {of} IS {literal(text)}")
        # A new name has the schema's default privileges, of which some may have been revoked.
        for grantee in {grantee for _, grantee, *_ in self._rows(_GRANTS)}:
            self._run(f"REVOKE ALL ON {self._view} FROM {grantee}")
        for column, grantee, privilege, may_grant in grants:
            if column is not None and column not in known:
                continue
            of_column = f" ({identifier(column)})" if column else ""
            option = " WITH GRANT OPTION" if may_grant else ""
            self._run(f"GRANT {privilege}{of_column} ON {self._view} TO {grantee}{option}")

    def _dependents(self) -> list[str]:
        """Views that are defined over the name."""
        rows = self._rows(
            "SELECT DISTINCT format('%%I.%%I', n.nspname, c.relname) FROM pg_depend d "
            "JOIN pg_rewrite r ON r.oid = d.objid JOIN pg_class c ON c.oid = r.ev_class "
            "JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE d.classid = 'pg_rewrite'::regclass AND d.refclassid = 'pg_class'::regclass "
            "AND d.refobjid = to_regclass(%(view)s) AND c.oid <> d.refobjid ORDER BY 1"
        )
        return [found for (found,) in rows]

    def _rows(self, query: str, **values: str) -> psycopg.Cursor[Any]:
        """The rows of a query with the name's parameters."""
        given = {"name": self._name, "view": self._view, **values}
        return self._connection.execute(query.encode(), given)

    def _run(self, statement: str) -> None:
        self._connection.execute(statement.encode())
