"""Tables of aggregates over joins, and their refreshing (C18).

Besides the result (`name__v1`) there is a table of the sums that each key of the join adds to each
group (`…_by_key`), and one of the keys that have changed (`…_changed`). Triggers on the tables of
both sides insert changed keys, in the transaction that changes a sum. They only insert, so that no
writer waits for another. A refresh takes all changed keys in its snapshot, recomputes them, and
stores the positions of both sides in the same snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import psycopg

from everstate.postgres import Connection, identifier, literal
from everstate.views.kinds.join_sums import JoinSumsPlan
from everstate.views.kinds.kind import identifiers, quoted
from everstate.views.tables import physical

_EVENTS: Final = (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD"))
_TOUCHED: Final = "pg_temp.touched"
BESIDE: Final = ("_by_key", "_changed")
"""Suffixes of the names of the tables beside a result."""
MARK: Final = "_mark"
"""Suffix of the name of the trigger function that inserts changed keys."""


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
        self._connection, self._plan = connection, plan
        self._schema = quoted(schema_name)
        self._name = physical(plan.name, version)
        self._parts = [f"{self._schema}.{quoted(part)}" for part in parts]
        self._result, self._by_key, self._changed = (
            f"{self._schema}.{quoted(f'{self._name}{end}')}" for end in ("", *BESIDE)
        )
        self._summed = (*plan.group_names, *plan.sum_names)

    def install(self) -> None:
        """Create missing tables and triggers; inside a transaction.

        Raises LockNotAvailable when a side's table is locked for more than 200 ms.
        """
        plan = self._plan
        made = plan.contributions(self._parts)
        for table, columns in (
            (self._result, self._summed),
            (self._by_key, (*plan.keys, *self._summed)),
            (self._changed, plan.keys),
        ):
            self._run(
                f"CREATE TABLE IF NOT EXISTS {table} AS SELECT {identifiers(columns)} "
                f"FROM ({made}) AS made WITH NO DATA"
            )
        if plan.group_names:
            group = identifiers(plan.group_names)
            self._index("group", f"{self._result} ({group}) NULLS NOT DISTINCT", "UNIQUE ")
        self._index("empty", f"{self._result} (n) WHERE n = 0")
        self._index("key", f"{self._by_key} ({identifiers(plan.keys)})")
        self._run("SET LOCAL lock_timeout = '200ms'")
        self._install_triggers()
        self._run("SET LOCAL lock_timeout = 0")

    def _index(self, end: str, of: str, how: str = "") -> None:
        self._run(f"CREATE {how}INDEX IF NOT EXISTS {quoted(f'{self._name}_{end}')} ON {of}")

    def _install_triggers(self) -> None:
        mark = f"{self._schema}.{quoted(f'{self._name}{MARK}')}"
        keys = self._plan.keys
        groups = identifiers([f"g{place}" for place in range(len(keys))])
        insert = (
            f"INSERT INTO {self._changed} ({identifiers(keys)}) SELECT DISTINCT {groups} FROM moved"
        )
        body = literal(f"BEGIN {insert}; RETURN NULL; END")
        self._run(f"CREATE OR REPLACE FUNCTION {mark}() RETURNS trigger LANGUAGE plpgsql AS {body}")
        for part in self._parts:
            for event, which in _EVENTS:
                self._run(
                    f"CREATE OR REPLACE TRIGGER {quoted(f'{self._name}_{event.lower()}')} "
                    f"AFTER {event} ON {part} REFERENCING {which} "
                    f"TABLE AS moved FOR EACH STATEMENT EXECUTE FUNCTION {mark}()"
                )

    def refresh(self, *, is_full: bool) -> int:
        """Recompute the keys that have changed; inside a transaction with one snapshot.

        ``is_full``: recompute all keys. Returns how many were recomputed. Cost: the rows of both
        sides with these keys, by index.
        """
        if is_full:
            return self._fill()
        if not self._count(f"(SELECT FROM {self._changed} LIMIT 1) AS marked"):
            return 0  # without the cost of a temporary table
        keys = identifiers(self._plan.keys)
        self._run(
            f"CREATE TEMP TABLE touched ON COMMIT DROP AS SELECT DISTINCT {keys} "
            f"FROM {self._changed}"
        )
        count = self._count(_TOUCHED)
        self._run(f"ANALYZE {_TOUCHED}")
        self._run(f"CREATE TEMP TABLE fresh ON COMMIT DROP AS {self._contributed()}")
        self._add()
        for condition in self._conditions(self._plan.keys):
            self._run(f"DELETE FROM {self._by_key} WHERE {condition}")
        self._run(f"INSERT INTO {self._by_key} SELECT * FROM pg_temp.fresh")
        # Only the rows in this snapshot; keys that were inserted meanwhile stay.
        self._run(f"DELETE FROM {self._changed}")
        return count

    def _fill(self) -> int:
        for table in (self._by_key, self._result, self._changed):
            self._run(f"DELETE FROM {table}")
        self._run(f"INSERT INTO {self._by_key} {self._plan.contributions(self._parts)}")
        self._run(f"INSERT INTO {self._result} {self._sums_of(self._by_key)}")
        keys = f"SELECT DISTINCT {identifiers(self._plan.keys)} FROM {self._by_key}"
        return self._count(f"({keys}) AS keys")

    def _add(self) -> None:
        """Add the new sums of the keys to the result, and subtract their former sums."""
        plan = self._plan
        taken = [f"-{quoted(name)}" for name in plan.sum_names]
        former = ", ".join([*map(quoted, plan.group_names), *taken])
        rows = [f"SELECT {identifiers(self._summed)} FROM pg_temp.fresh"]
        rows += [
            f"SELECT {former} FROM {self._by_key} WHERE {condition}"
            for condition in self._conditions(plan.keys)
        ]
        difference = f"({' UNION ALL '.join(rows)}) AS difference"
        if not plan.group_names:
            # There is only one row, which replaces the former one.
            added = f"(SELECT * FROM before UNION ALL SELECT * FROM {difference}) AS added"
            self._run(
                f"WITH before AS (DELETE FROM {self._result} RETURNING *) "
                f"INSERT INTO {self._result} {self._sums_of(added)}"
            )
            return
        sums = ", ".join(f"{n} = kept.{n} + excluded.{n}" for n in map(quoted, plan.sum_names))
        self._run(
            f"INSERT INTO {self._result} AS kept {self._sums_of(difference)} "
            f"ON CONFLICT ({identifiers(plan.group_names)}) DO UPDATE SET {sums}"
        )
        self._run(f"DELETE FROM {self._result} WHERE n = 0")

    def _contributed(self) -> str:
        """The sums that the touched keys add to each group now."""
        places = [f"g{place}" for place in range(len(self._plan.keys))]
        found, *apart = self._conditions(places)
        query = self._plan.contributions(self._parts, [f" WHERE {found}"] * len(self._parts))
        # A key with a null joins with no row; in a LEFT JOIN its left rows stay, with a null
        # right side.
        for condition in apart:
            more = self._plan.contributions(self._parts, [f" WHERE {condition}", " WHERE false"])
            query += f" UNION ALL {more}"
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

    def _sums_of(self, table: str) -> str:
        """A query of the groups of a table, and its sums in the types of the result."""
        sums = [
            f"coalesce(sum({quoted(name)}), 0){'::bigint' if kind == 'count' else ''} "
            f"AS {quoted(name)}"
            for name, kind, _ in self._plan.sums
        ]
        groups = self._plan.group_names
        query = f"SELECT {', '.join([*map(quoted, groups), *sums])} FROM {table}"
        return query + (f" GROUP BY {identifiers(groups)}" if groups else "")

    def _count(self, table: str) -> int:
        row = self._run(f"SELECT count(*) FROM {table}").fetchone()
        return 0 if row is None else int(row[0])

    def _run(self, statement: str) -> psycopg.Cursor[Any]:
        return self._connection.execute(statement.encode())


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
    connection.execute(f"TRUNCATE {identifier(schema_name, f'{name}_changed')}".encode())
    connection.execute("SET LOCAL lock_timeout = 0")


def drop_triggers(connection: Connection, schema_name: str, name: str) -> None:
    """Drop the trigger function of a result; CASCADE drops the triggers too."""
    mark = identifier(schema_name, f"{name}{MARK}")
    connection.execute(f"DROP FUNCTION IF EXISTS {mark} CASCADE".encode())
