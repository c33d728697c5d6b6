"""Tables of aggregates over joins, and their refreshing (C18).

Besides the result (`name__v1`) there is a table of the sums that each key of the join adds to each
group (`…_by_key`), and one of the keys that have changed (`…_changed`). Triggers on the tables of
both sides insert changed keys, in the transaction that changes a sum. They only insert, so that no
writer waits for another. A refresh takes all changed keys in its snapshot, recomputes them, and
stores the positions of both sides in the same snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql
from psycopg.sql import Composable, Composed

from everstate.views.control import Connection
from everstate.views.kinds.join_sums import JoinSumsPlan
from everstate.views.tables import physical

_EVENTS: Final = (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD"))
_TOUCHED: Final = "pg_temp.touched"
BESIDE: Final = ("_by_key", "_changed")
"""Suffixes of the names of the tables beside a result."""
MARK: Final = "_mark"
"""Suffix of the name of the trigger function that inserts changed keys."""


@dataclass(frozen=True, slots=True)
class Refreshed:
    """What one refresh did."""

    keys: int
    """Number of the join's keys that were recomputed."""
    is_full: bool


class JoinTables:
    """The tables of one version of an aggregate over a join."""

    def __init__(
        self,
        connection: Connection,
        schema_name: str,
        plan: JoinSumsPlan,
        version: int,
        parts: Sequence[str],
    ) -> None:
        """``parts``: names of the tables of both sides' published versions."""
        self._connection, self._schema, self._plan = connection, schema_name, plan
        self._name = physical(plan.name, version)
        self._parts = [sql.Identifier(schema_name, part) for part in parts]
        ends = ("", *BESIDE)
        self._result, self._by_key, self._changed = (
            sql.Identifier(schema_name, f"{self._name}{end}") for end in ends
        )

    def install(self) -> None:
        """Create missing tables and triggers; inside a transaction.

        Raises LockNotAvailable when a side's table is locked for more than 200 ms.
        """
        plan = self._plan
        made = self._plan.contributions(self._parts)
        for table, columns in (
            (self._result, self._summed),
            (self._by_key, self._kept),
            (self._changed, plan.keys),
        ):
            self._run(
                "CREATE TABLE IF NOT EXISTS {} AS SELECT {} FROM ({}) AS made WITH NO DATA",
                *(table, _names(columns), made),
            )
        if plan.group_names:
            self._index("group", self._result, plan.group_names, "UNIQUE ", " NULLS NOT DISTINCT")
        self._index("empty", self._result, ("n",), "", " WHERE n = 0")
        self._index("key", self._by_key, plan.keys)
        self._run("SET LOCAL lock_timeout = '200ms'")
        self._install_triggers()
        self._run("SET LOCAL lock_timeout = 0")

    def _index(
        self, end: str, table: Composable, names: Sequence[str], how: str = "", more: str = ""
    ) -> None:
        name = sql.Identifier(f"{self._name}_{end}")
        text = f"CREATE {how}INDEX IF NOT EXISTS {{}} ON {{}} ({{}}){more}"
        self._run(text, name, table, _names(names))

    def _install_triggers(self) -> None:
        mark = sql.Identifier(self._schema, f"{self._name}{MARK}")
        keys = self._plan.keys
        insert = sql.SQL("INSERT INTO {} ({}) SELECT DISTINCT {} FROM moved").format(
            self._changed, _names(keys), _names([f"g{place}" for place in range(len(keys))])
        )
        body = f"BEGIN {insert.as_string(self._connection)}; RETURN NULL; END"
        self._run(
            "CREATE OR REPLACE FUNCTION {}() RETURNS trigger LANGUAGE plpgsql AS {}",
            *(mark, sql.Literal(body)),
        )
        for part in self._parts:
            for event, which in _EVENTS:
                self._run(
                    f"CREATE OR REPLACE TRIGGER {{}} AFTER {event} ON {{}} REFERENCING {which} "
                    "TABLE AS moved FOR EACH STATEMENT EXECUTE FUNCTION {}()",
                    *(sql.Identifier(f"{self._name}_{event.lower()}"), part, mark),
                )

    def refresh(self, *, is_full: bool) -> Refreshed:
        """Recompute the keys that have changed; inside a transaction with one snapshot.

        ``is_full``: recompute all keys. Cost: the rows of both sides with these keys, by index.
        """
        if is_full:
            return self._fill()
        marked = sql.SQL("(SELECT FROM {} LIMIT 1) AS marked").format(self._changed)
        if not self._count(marked):
            return Refreshed(0, is_full=False)  # without the cost of a temporary table
        keys = _names(self._plan.keys)
        self._run(
            "CREATE TEMP TABLE touched ON COMMIT DROP AS SELECT DISTINCT {} FROM {}",
            *(keys, self._changed),
        )
        count = self._count(sql.SQL(_TOUCHED))
        self._run(f"ANALYZE {_TOUCHED}")
        self._run("CREATE TEMP TABLE fresh ON COMMIT DROP AS {}", self._contributed())
        self._add()
        for condition in self._conditions(self._plan.keys):
            self._run("DELETE FROM {} WHERE {}", self._by_key, sql.SQL(condition))
        self._run("INSERT INTO {} SELECT * FROM pg_temp.fresh", self._by_key)
        # Only the rows in this snapshot; keys that were inserted meanwhile stay.
        self._run("DELETE FROM {}", self._changed)
        return Refreshed(count, is_full=False)

    def _fill(self) -> Refreshed:
        for table in (self._by_key, self._result, self._changed):
            self._run("DELETE FROM {}", table)
        self._run("INSERT INTO {} {}", self._by_key, self._plan.contributions(self._parts))
        query = sql.SQL("INSERT INTO {} ").format(self._result)
        self._connection.execute(query + self._sums_of(self._by_key))
        keys = sql.SQL("(SELECT DISTINCT {} FROM {}) AS keys").format(
            _names(self._plan.keys), self._by_key
        )
        return Refreshed(self._count(keys), is_full=True)

    def _add(self) -> None:
        """Add the new sums of the keys to the result, and subtract their former sums."""
        plan = self._plan
        new = sql.SQL("SELECT {} FROM pg_temp.fresh").format(_names(self._summed))
        taken = [sql.SQL("-{}").format(sql.Identifier(name)) for name in plan.sum_names]
        old = [
            sql.SQL("SELECT {} FROM {} WHERE {}").format(
                sql.SQL(", ").join([*map(sql.Identifier, plan.group_names), *taken]),
                self._by_key,
                sql.SQL(condition),
            )
            for condition in self._conditions(plan.keys)
        ]
        difference = sql.SQL("({}) AS difference").format(sql.SQL(" UNION ALL ").join([new, *old]))
        if not plan.group_names:
            # There is only one row, which replaces the former one.
            self._run(
                "WITH before AS (DELETE FROM {} RETURNING *) INSERT INTO {} {}",
                *(self._result, self._result),
                self._sums_of(
                    sql.SQL("(SELECT * FROM before UNION ALL SELECT * FROM {}) AS added").format(
                        difference
                    )
                ),
            )
            return
        added = [
            sql.SQL("{0} = kept.{0} + excluded.{0}").format(sql.Identifier(name))
            for name in plan.sum_names
        ]
        self._run(
            "INSERT INTO {} AS kept {} ON CONFLICT ({}) DO UPDATE SET {}",
            *(self._result, self._sums_of(difference), _names(plan.group_names)),
            sql.SQL(", ").join(added),
        )
        self._run("DELETE FROM {} WHERE n = 0", self._result)

    def _contributed(self) -> Composed:
        """The sums that the touched keys add to each group now."""
        places = [f"g{place}" for place in range(len(self._plan.keys))]
        found, *apart = self._conditions(places)
        query = self._plan.contributions(self._parts, [f" WHERE {found}"] * len(self._parts))
        # A key with a null joins with no row; in a LEFT JOIN its left rows stay, with a null
        # right side.
        for condition in apart:
            query += sql.SQL(" UNION ALL {}").format(
                self._plan.contributions(self._parts, [f" WHERE {condition}", " WHERE false"])
            )
        return query

    def _conditions(self, columns: Sequence[str]) -> list[str]:
        """Conditions for the touched keys; a separate one for keys with nulls, without an index."""
        keys = ", ".join(self._plan.keys)
        found = [f"({', '.join(columns)}) IN (SELECT {keys} FROM {_TOUCHED})"]
        if self._plan.is_left:
            absent = " OR ".join(f"{name} IS NULL" for name in columns)
            touched = " OR ".join(f"{name} IS NULL" for name in self._plan.keys)
            found.append(f"({absent}) AND EXISTS (SELECT FROM {_TOUCHED} WHERE {touched})")
        return found

    @property
    def _summed(self) -> tuple[str, ...]:
        return (*self._plan.group_names, *self._plan.sum_names)

    @property
    def _kept(self) -> tuple[str, ...]:
        return (*self._plan.keys, *self._summed)

    def _sums_of(self, table: Composable) -> Composed:
        """A query of the groups of a table, and its sums in the types of the result."""
        sums = [
            sql.SQL(
                f"coalesce(sum({{0}}), 0){'::bigint' if kind == 'count' else ''} AS {{0}}"
            ).format(sql.Identifier(name))
            for name, kind, _ in self._plan.sums
        ]
        groups = list(map(sql.Identifier, self._plan.group_names))
        query = sql.SQL("SELECT {} FROM {}").format(sql.SQL(", ").join([*groups, *sums]), table)
        if groups:
            query += sql.SQL(" GROUP BY {}").format(_names(self._plan.group_names))
        return query

    def _count(self, table: Composable) -> int:
        row = self._connection.execute(sql.SQL("SELECT count(*) FROM {}").format(table)).fetchone()
        return 0 if row is None else int(row[0])

    def _run(self, text: str, *parts: Composable) -> None:
        self._connection.execute(sql.SQL(text).format(*parts))


def _names(names: Sequence[str]) -> Composed:
    return sql.SQL(", ").join(map(sql.Identifier, names))


def marking(connection: Connection, schema_name: str, names: Collection[str]) -> list[str]:
    """Those of some results' tables whose triggers insert changed keys."""
    query = (
        "SELECT proname FROM pg_catalog.pg_proc JOIN pg_catalog.pg_namespace n "
        "ON n.oid = pronamespace WHERE nspname = %s AND proname = ANY(%s)"
    )
    wanted = [f"{name}{MARK}" for name in names]
    found = connection.execute(query, (schema_name, wanted)).fetchall()
    return sorted(str(row[0]).removesuffix(MARK) for row in found)


def stop_marking(connection: Connection, schema_name: str, name: str) -> None:
    """Drop the triggers of a result that is not refreshed any more, and its changed keys.

    Inside a transaction; :meth:`JoinTables.install` makes the triggers again. Raises
    LockNotAvailable when a side's table is locked for more than 200 ms.
    """
    connection.execute("SET LOCAL lock_timeout = '200ms'")
    drop_triggers(connection, schema_name, name)
    changed = sql.Identifier(schema_name, f"{name}_changed")
    connection.execute(sql.SQL("TRUNCATE {}").format(changed))
    connection.execute("SET LOCAL lock_timeout = 0")


def drop_triggers(connection: Connection, schema_name: str, name: str) -> None:
    """Drop the trigger function of a result; CASCADE drops the triggers too."""
    mark = sql.Identifier(schema_name, f"{name}{MARK}")
    connection.execute(sql.SQL("DROP FUNCTION IF EXISTS {} CASCADE").format(mark))
