"""Points a name that readers use to another version: short, retried, and grants stay (V13).

CREATE OR REPLACE VIEW waits for readers, and other readers queue behind it, so each try gives up
after 200 ms. It cannot drop or retype columns: then the name is dropped and created again with its
grants, unless another database view depends on it.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

import psycopg
from psycopg import sql

from everstate.errors import PublishRefused
from everstate.views.control import Connection

LOCK_MS: Final = 200


def point_reader(connection: Connection, schema_name: str, name: str, query: sql.Composed) -> None:
    """Make a name show a query, in the caller's transaction; does nothing if it already does.

    Raises PublishRefused with the names of views that depend on a column that would be dropped,
    and psycopg's LockNotAvailable when a reader holds a lock.
    """
    view, mark = sql.Identifier(schema_name, name), _mark(query.as_string(connection))
    if _comment(connection, schema_name, name) == mark:
        return
    connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(LOCK_MS)))
    connection.execute("SAVEPOINT point")
    try:
        connection.execute(sql.SQL("CREATE OR REPLACE VIEW {} AS {}").format(view, query))
    except psycopg.errors.InvalidTableDefinition:
        connection.execute("ROLLBACK TO SAVEPOINT point")
        _make_again(connection, schema_name, name, query)
    connection.execute(sql.SQL("COMMENT ON VIEW {} IS {}").format(view, sql.Literal(mark)))
    connection.execute("SET LOCAL lock_timeout = 0")


def _mark(query: str) -> str:
    """The comment of a name with the hash of its query, to detect that it shows it already."""
    return f"everstate shows {sha256(query.encode()).hexdigest()[:24]}"


def _comment(connection: Connection, schema_name: str, name: str) -> str | None:
    query = "SELECT obj_description(to_regclass(format('%%I.%%I', %s::text, %s::text)), 'pg_class')"
    row = connection.execute(query, (schema_name, name)).fetchone()
    return None if row is None else row[0]


def drop_reader(connection: Connection, schema_name: str, name: str) -> None:
    """Drop a name that readers use; raises PublishRefused when a view depends on it."""
    connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(LOCK_MS)))
    dependents = _dependents(connection, schema_name, name)
    if dependents:
        raise PublishRefused(name, dependents)
    view = sql.Identifier(schema_name, name)
    connection.execute(sql.SQL("DROP VIEW IF EXISTS {}").format(view))
    connection.execute("SET LOCAL lock_timeout = 0")


def _make_again(connection: Connection, schema_name: str, name: str, query: sql.Composed) -> None:
    """Drop a name and create it again, with the grants that it had."""
    dependents = _dependents(connection, schema_name, name)
    if dependents:
        raise PublishRefused(name, dependents)
    view = sql.Identifier(schema_name, name)
    grants = connection.execute(
        "SELECT CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END, "
        "privilege_type, is_grantable FROM pg_class, aclexplode(relacl) "
        "WHERE oid = format('%%I.%%I', %s::text, %s::text)::regclass",
        (schema_name, name),
    ).fetchall()
    connection.execute(sql.SQL("DROP VIEW {}").format(view))
    connection.execute(sql.SQL("CREATE VIEW {} AS {}").format(view, query))
    for grantee, privilege, may_grant in grants:
        more = " WITH GRANT OPTION" if may_grant else ""
        connection.execute(
            sql.SQL("GRANT {} ON {} TO {}{}").format(
                sql.SQL(privilege), view, sql.SQL(grantee), sql.SQL(more)
            )
        )


def _dependents(connection: Connection, schema_name: str, name: str) -> list[str]:
    """Views that are defined over a name."""
    query = (
        "SELECT DISTINCT format('%%I.%%I', n.nspname, c.relname) FROM pg_depend d "
        "JOIN pg_rewrite r ON r.oid = d.objid JOIN pg_class c ON c.oid = r.ev_class "
        "JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE d.classid = 'pg_rewrite'::regclass AND d.refclassid = 'pg_class'::regclass "
        "AND d.refobjid = to_regclass(format('%%I.%%I', %s::text, %s::text)) "
        "AND c.oid <> d.refobjid ORDER BY 1"
    )
    return [found for (found,) in connection.execute(query, (schema_name, name))]
