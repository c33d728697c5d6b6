"""Points a name that readers use to another version: short, retried, and grants stay (V13).

CREATE OR REPLACE VIEW waits for readers, and other readers queue behind it, so each try gives up
after 200 ms. It cannot drop or retype columns: then the name is dropped and created again with all
that others have set on it (owner, options, grants, comments), unless another database view depends
on it.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

import psycopg
from psycopg import sql

from everstate.errors import PublishRefused
from everstate.views.control import Connection

LOCK_MS: Final = 200
_GRANTED: Final = (
    "CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END, "
    "privilege_type, is_grantable"
)
_GRANTS: Final = (
    f"SELECT NULL, {_GRANTED} FROM pg_class, "
    "aclexplode(coalesce(relacl, acldefault('r', relowner))) "
    "WHERE oid = format('%%I.%%I', %s::text, %s::text)::regclass UNION ALL "
    f"SELECT attname::text, {_GRANTED} FROM pg_attribute, aclexplode(attacl) "
    "WHERE attrelid = format('%%I.%%I', %s::text, %s::text)::regclass AND NOT attisdropped"
)


def point_reader(connection: Connection, schema_name: str, name: str, query: sql.Composed) -> None:
    """Make a name show a query, in the caller's transaction; does nothing if it already does.

    Raises PublishRefused with the names of views that depend on a column that would be dropped,
    and psycopg's LockNotAvailable when a reader holds a lock.
    """
    view = sql.Identifier(schema_name, name)
    shows = sha256(query.as_string(connection).encode()).hexdigest()
    if _shows(connection, schema_name, name) == shows:
        return
    connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(LOCK_MS)))
    connection.execute("SAVEPOINT point")
    try:
        connection.execute(sql.SQL("CREATE OR REPLACE VIEW {} AS {}").format(view, query))
    except psycopg.errors.InvalidTableDefinition:
        connection.execute("ROLLBACK TO SAVEPOINT point")
        _make_again(connection, schema_name, name, query)
    connection.execute(
        sql.SQL(
            "INSERT INTO {} (name, relation, shows) "
            "VALUES (%(name)s, format('%%I.%%I', %(schema)s::text, %(name)s::text)::regclass, "
            "%(shows)s) ON CONFLICT (name) DO UPDATE "
            "SET relation = excluded.relation, shows = excluded.shows"
        ).format(sql.Identifier(schema_name, "reader_name")),
        {"name": name, "schema": schema_name, "shows": shows},
    )
    connection.execute("SET LOCAL lock_timeout = 0")


def _shows(connection: Connection, schema_name: str, name: str) -> str | None:
    """The hash of the query that a name shows; ``None``: it was not made here, or is not there."""
    query = sql.SQL(
        "SELECT shows FROM {} WHERE name = %s "
        "AND relation = to_regclass(format('%%I.%%I', %s::text, %s::text))"
    ).format(sql.Identifier(schema_name, "reader_name"))
    row = connection.execute(query, (name, schema_name, name)).fetchone()
    return None if row is None else row[0]


def _comments(connection: Connection, schema_name: str, name: str) -> list[tuple[str | None, str]]:
    """Comments on a name (``None``) and on its columns."""
    query = (
        "SELECT attname::text, description FROM pg_description LEFT JOIN pg_attribute "
        "ON attrelid = objoid AND attnum = objsubid AND objsubid > 0 "
        "WHERE classoid = 'pg_class'::regclass "
        "AND objoid = to_regclass(format('%%I.%%I', %s::text, %s::text)) ORDER BY objsubid"
    )
    return connection.execute(query, (schema_name, name)).fetchall()


def drop_reader(connection: Connection, schema_name: str, name: str) -> None:
    """Drop a name that readers use; raises PublishRefused when a view depends on it."""
    connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(LOCK_MS)))
    dependents = _dependents(connection, schema_name, name)
    if dependents:
        raise PublishRefused(name, dependents, is_dropped=True)
    _drop(connection, schema_name, name, is_dropped=True)
    connection.execute("SET LOCAL lock_timeout = 0")


def _drop(connection: Connection, schema_name: str, name: str, *, is_dropped: bool = False) -> None:
    """Drop a name; raises PublishRefused when anything but a view depends on it, too."""
    view = sql.Identifier(schema_name, name)
    try:
        with connection.transaction():
            connection.execute(sql.SQL("DROP VIEW IF EXISTS {}").format(view))
    except psycopg.errors.DependentObjectsStillExist as cause:
        # Such as a SQL function, or a table with a column of the view's row type.
        found = (cause.diag.message_detail or str(cause)).splitlines()
        named = [line.partition(" depends on")[0] for line in found]
        raise PublishRefused(name, named, is_dropped=is_dropped) from cause


def columns_of(connection: Connection, schema_name: str, name: str) -> list[str]:
    """Columns that readers see under a name, in their order; empty: it does not exist."""
    query = (
        "SELECT attname::text FROM pg_attribute WHERE attnum > 0 AND NOT attisdropped "
        "AND attrelid = to_regclass(format('%%I.%%I', %s::text, %s::text)) ORDER BY attnum"
    )
    return [column for (column,) in connection.execute(query, (schema_name, name))]


def holders(connection: Connection, schema_name: str, name: str) -> list[str]:
    """Other sessions that hold a lock on a name, the oldest first."""
    query = (
        "SELECT DISTINCT ON (xact_start, pid) pid, "
        "coalesce(nullif(application_name, ''), usename, '?') "
        "FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE granted AND pid <> pg_backend_pid() "
        "AND relation = to_regclass(format('%%I.%%I', %s::text, %s::text)) ORDER BY xact_start, pid"
    )
    rows = connection.execute(query, (schema_name, name))
    return [f"{application} (process {pid})" for pid, application in rows]


def _make_again(connection: Connection, schema_name: str, name: str, query: sql.Composed) -> None:
    """Drop a name and create it again, with all that others have set on it."""
    dependents = _dependents(connection, schema_name, name)
    if dependents:
        raise PublishRefused(name, dependents)
    view = sql.Identifier(schema_name, name)
    place = (schema_name, name)
    ((owner, options),) = connection.execute(
        "SELECT pg_get_userbyid(relowner), coalesce(reloptions, '{}') FROM pg_class "
        "WHERE oid = format('%%I.%%I', %s::text, %s::text)::regclass",
        place,
    ).fetchall()
    grants = connection.execute(_GRANTS, (*place, *place)).fetchall()
    comments = _comments(connection, schema_name, name)
    _drop(connection, schema_name, name)
    connection.execute(sql.SQL("CREATE VIEW {} AS {}").format(view, query))
    connection.execute(sql.SQL("ALTER VIEW {} OWNER TO {}").format(view, sql.Identifier(owner)))
    for option in options:
        connection.execute(sql.SQL("ALTER VIEW {} SET ({})").format(view, sql.SQL(option)))
    known = columns_of(connection, schema_name, name)
    for column, text in comments:
        if column is None:
            what, on = sql.SQL("VIEW"), view
        elif column in known:
            what, on = sql.SQL("COLUMN"), sql.Identifier(schema_name, name, column)
        else:
            continue
        comment = sql.SQL("COMMENT ON {} {} IS {}").format(what, on, sql.Literal(text))
        connection.execute(comment)
    # A new name has the schema's default privileges, of which some may have been revoked.
    given = connection.execute(_GRANTS, (*place, *place)).fetchall()
    for grantee in {grantee for _, grantee, *_ in given}:
        revoke = sql.SQL("REVOKE ALL ON {} FROM {}").format(view, sql.SQL(grantee))
        connection.execute(revoke)
    for column, grantee, privilege, may_grant in grants:
        if column is not None and column not in known:
            continue
        of_column = sql.SQL(" ({})").format(sql.Identifier(column)) if column else sql.SQL("")
        connection.execute(
            sql.SQL("GRANT {}{} ON {} TO {}{}").format(
                sql.SQL(privilege),
                of_column,
                view,
                sql.SQL(grantee),
                sql.SQL(" WITH GRANT OPTION" if may_grant else ""),
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
