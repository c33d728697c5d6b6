"""Pointing a reader's name to another version: short, tried again, and nothing lost (V13).

CREATE OR REPLACE VIEW waits behind a reader and lets others queue behind it, so each try gives up
after 200 ms. It cannot drop or retype columns: then the name is dropped and made again with its
grants, unless somebody else's view depends on it.
"""

from __future__ import annotations

from typing import Final

import psycopg
from psycopg import sql

from everstate.errors import PublishRefused
from everstate.views.control import Connection

LOCK_MS: Final = 200


def point_reader(connection: Connection, schema_name: str, name: str, query: sql.Composed) -> None:
    """Let a name show a query; inside the caller's transaction.

    Raises PublishRefused with the names of views that depend on a column that would go, and
    psycopg's LockNotAvailable when a reader is in the way.
    """
    view = sql.Identifier(schema_name, name)
    connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(LOCK_MS)))
    connection.execute("SAVEPOINT point")
    try:
        connection.execute(sql.SQL("CREATE OR REPLACE VIEW {} AS {}").format(view, query))
    except psycopg.errors.InvalidTableDefinition:
        connection.execute("ROLLBACK TO SAVEPOINT point")
        _make_again(connection, schema_name, name, query)
    connection.execute("SET LOCAL lock_timeout = 0")


def drop_reader(connection: Connection, schema_name: str, name: str) -> None:
    """Take a name away from readers; raises PublishRefused when a view depends on it."""
    connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(LOCK_MS)))
    dependents = _dependents(connection, schema_name, name)
    if dependents:
        raise PublishRefused(name, dependents)
    view = sql.Identifier(schema_name, name)
    connection.execute(sql.SQL("DROP VIEW IF EXISTS {}").format(view))
    connection.execute("SET LOCAL lock_timeout = 0")


def _make_again(connection: Connection, schema_name: str, name: str, query: sql.Composed) -> None:
    """Drop a name and make it again, with the owner and the grants that it had."""
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
