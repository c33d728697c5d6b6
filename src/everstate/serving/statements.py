"""The SQL statements of a reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from everstate.errors import InvalidQuery
from everstate.postgres import identifier

if TYPE_CHECKING:
    from everstate.serving.predicates import Condition, Term

_COLUMNS: Final = (
    "key, version, kind, state, as_of, occurred_at, recorded_at, change_id, provenance, "
    'generation, partition, "offset"'
)


def aware(moment: datetime) -> datetime:
    """The time unchanged; raises InvalidQuery when it has no UTC offset."""
    if moment.tzinfo is None:
        raise InvalidQuery(f"time {moment.isoformat()} has no UTC offset.")
    return moment


def _table(schema: str, entity: str, view: str) -> str:
    # The readers' view, never a physical table: a rebuild points it to another one (C28).
    return identifier(schema, f"{entity}_{view}")


def _kept(view: str, text: str) -> Callable[[str, str], bytes]:
    """Makes a statement on a view of an entity type, by the schema and the type's name."""

    @lru_cache
    def statement(schema: str, entity: str) -> bytes:
        return text.format(_COLUMNS, _table(schema, entity, view)).encode()

    return statement


now = _kept("latest", "SELECT {} FROM {} WHERE key = %s")
"""The newest version of a key."""
now_of = _kept("latest", "SELECT {} FROM {} WHERE key = ANY(%s)")
"""The newest versions of some keys."""
at = _kept(
    "history",
    "SELECT {} FROM {} WHERE key = %s AND as_of <= %s ORDER BY key DESC, version DESC LIMIT 1",
)
"""The version of a key that was valid at a world time."""
at_of = _kept(
    "history",
    "SELECT DISTINCT ON (key) {} FROM {} WHERE key = ANY(%s) AND as_of <= %s "
    "ORDER BY key, version DESC",
)
"""The versions of some keys that were valid at a world time."""
recorded_at = _kept(
    "history",
    "SELECT {} FROM {} WHERE key = %s AND recorded_at <= %s ORDER BY version DESC LIMIT 1",
)
"""The newest version of a key that was recorded by a time."""
version = _kept("history", "SELECT {} FROM {} WHERE key = %s AND version = %s")
"""One version of a key."""
history = _kept(
    "history",
    "SELECT {}, event, transaction FROM {} WHERE key = %s "
    "AND (%s::bigint IS NULL OR version < %s) ORDER BY version DESC LIMIT %s",
)
"""Versions of a key before one, the newest first."""
history_from = _kept(
    "history",
    "SELECT {}, event, transaction FROM {} WHERE key = %s AND version >= %s "
    "AND (%s::bigint IS NULL OR version < %s) ORDER BY version LIMIT %s",
)
"""Versions of a key from one on and before another one, the oldest first."""
two_versions = _kept(
    "history",
    "SELECT {}, event, transaction FROM {} WHERE key = %s "
    "AND (%s::bigint IS NULL OR version <= %s) ORDER BY version DESC LIMIT 2",
)
"""The newest version of a key, or the newest up to a given one; and the previous version."""
ends = _kept("history", "SELECT min(version), max(version), min(as_of) FROM {1} WHERE key = %s")
"""First and last version of a key, and its first as-of time."""
near = _kept(
    "latest",
    "(SELECT key FROM {1} WHERE key < %s ORDER BY key DESC LIMIT 1) UNION ALL "
    "(SELECT key FROM {1} WHERE key > %s ORDER BY key LIMIT 1)",
)
"""The neighbouring keys of a key."""
keys_from = _kept(
    "latest",
    "SELECT key, version, kind, as_of, state IS NULL FROM {1} WHERE key >= %s "
    "ORDER BY key LIMIT %s",
)
"""Keys from one on, in order, each with its version and whether it is deleted."""


@lru_cache
def deleted(schema: str, entity: str, *, keeps_history: bool) -> bytes:
    """Deleting versions of entities that are deleted now, each with the state before it."""
    gone = "FROM {1} WHERE state IS NULL AND (%s::text IS NULL OR key > %s) ORDER BY key LIMIT %s"
    if not keeps_history:
        return _kept("latest", "SELECT {0}, NULL, NULL, NULL " + gone)(schema, entity)
    text = (
        "SELECT {0}, event, transaction, (SELECT earlier.state FROM {2} AS earlier "
        "WHERE earlier.key = this.key AND earlier.version = this.version - 1) FROM {2} AS this "
        "WHERE (key, version) IN (SELECT key, version " + gone + ") ORDER BY key"
    )
    tables = (_table(schema, entity, view) for view in ("latest", "history"))
    return text.format(_COLUMNS, *tables).encode()


def written(schema: str, entity: str, conditions: Sequence[str]) -> bytes:
    """Versions that meet conditions, each with the state before it, by their recording."""
    table = _table(schema, entity, "history")
    return (
        f"SELECT {_COLUMNS}, event, transaction, (SELECT earlier.state FROM {table} AS earlier "
        "WHERE earlier.key = this.key AND earlier.version = this.version - 1) "
        f"FROM {table} AS this WHERE {' AND '.join(['true', *conditions])} "
        "ORDER BY recorded_at, key, version LIMIT %s"
    ).encode()


def listing(
    schema: str,
    entity: str,
    at: datetime | None,
    predicates: Sequence[Condition],
    orders: Sequence[Term],
    after: str | None = None,
) -> tuple[bytes, list[Any]]:
    """The statement of a list and its parameters, without the last one, the limit."""
    conditions = ["state IS NOT NULL"]
    parameters: list[Any] = []
    table = _table(schema, entity, "latest" if at is None else "history")
    if at is not None:
        # A version is valid at a time when its as_of is not later and that of the next version is:
        # as_of never decreases from version to version, and versions are dense.
        conditions.append(
            f"as_of <= %s AND NOT EXISTS (SELECT 1 FROM {table} AS later "
            "WHERE later.key = this.key AND later.version = this.version + 1 "
            "AND later.as_of <= %s)"
        )
        parameters += [aware(at), at]
    if after is not None:
        conditions.append("key > %s")
        parameters.append(after)
    for predicate in predicates:
        text, values = predicate.compose()
        conditions.append(text)
        parameters += values
    ordering = ", ".join([*(order.order for order in orders), "key"])
    query = (
        f"SELECT {_COLUMNS} FROM {table} AS this WHERE {' AND '.join(conditions)} "
        f"ORDER BY {ordering} LIMIT %s"
    )
    return query.encode(), parameters
