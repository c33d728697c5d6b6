"""Version gaps as the views see them: keys whose later changes wait for one that never came."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from psycopg import sql

from everstate.errors import NoGap
from everstate.views.control import Connection
from everstate.views.stores.postgres.group import physical
from everstate.views.stores.postgres.held import unpacked

# The main group is ahead of every view that is kept alone: what waits only there comes by itself.
_WAITING: Final = """
SELECT held.view_group, held.key, array_agg(held.version ORDER BY held.version),
    min(held.held_at),
    ARRAY(
        SELECT name FROM {views} AS view WHERE view.entity = held.view_group AND (
            view.view_group = held.view_group OR EXISTS (
                SELECT FROM {held} AS alone
                WHERE alone.view_group = view.view_group AND alone.key = held.key
            )
        ) ORDER BY name
    )
FROM {held} AS held
WHERE strpos(held.view_group, '/') = 0
    AND (%(entity)s::text IS NULL OR held.view_group = %(entity)s)
    AND (%(key)s::text IS NULL OR held.key = %(key)s)
GROUP BY held.view_group, held.key ORDER BY held.view_group, held.key
"""
_FIRST: Final = (
    "SELECT row, generation, partition FROM {} WHERE view_group = %s AND key = %s AND version = %s"
)


@dataclass(frozen=True, slots=True)
class Gap:
    """A key whose changes wait, because a version before them did not come."""

    entity: str
    key: str
    expected_version: int
    """The version that is missing; the views have the one before it."""
    held_versions: tuple[int, ...]
    """Versions that wait."""
    since: datetime
    """When the first of them began to wait."""
    views: tuple[str, ...]
    """Views that wait, `latest` and `history` not named; an entity type may have none."""

    @property
    def missing(self) -> range:
        """Versions between what the views have and what waits."""
        return range(self.expected_version, self.held_versions[0])


@dataclass(frozen=True, slots=True)
class GapEdges:
    """What stands on both sides of a gap: a state as JSON text, and a message."""

    before: str | None
    """The key's newest state; ``None``: it does not exist, or is deleted."""
    after: bytes
    """The first message that waits, byte-exact."""
    generation: int
    partition: int


def read_gaps(
    connection: Connection, schema_name: str, entity: str | None = None, key: str | None = None
) -> list[Gap]:
    """Gaps of all entity types, of one, or of one key; by entity type and key.

    Cost: a scan of the changes that wait, which ``pipeline.held_max`` bounds.
    """
    query = sql.SQL(_WAITING).format(
        held=sql.Identifier(schema_name, "held"), views=sql.Identifier(schema_name, "view")
    )
    by_entity = defaultdict(list)
    for row in connection.execute(query, {"entity": entity, "key": key}):
        by_entity[row[0]].append(row)
    found: list[Gap] = []
    for name, rows in by_entity.items():
        newest = _versions(connection, schema_name, name, [row[1] for row in rows])
        for _, each, versions, since, views in rows:
            version = newest.get(each, 0)
            later = tuple(v for v in versions if v > version)
            if later and later[0] > version + 1:
                found.append(Gap(name, each, version + 1, later, since, tuple(views)))
    return found


def read_edges(connection: Connection, schema_name: str, gap: Gap) -> GapEdges:
    """What stands on both sides of a gap; raises NoGap when it has filled meanwhile."""
    query = sql.SQL(_FIRST).format(sql.Identifier(schema_name, "held"))
    values = (gap.entity, gap.key, gap.held_versions[0])
    waiting = connection.execute(query, values).fetchone()
    query = sql.SQL("SELECT version, state::text FROM {} WHERE key = %s").format(
        _latest(schema_name, gap.entity)
    )
    version, state = connection.execute(query, (gap.key,)).fetchone() or (0, None)
    if waiting is None or version + 1 != gap.expected_version:
        raise NoGap(gap.entity, gap.key)
    row, generation, partition = waiting
    return GapEdges(state, unpacked(row)["raw_value"][0].as_py(), generation, partition)


def _versions(
    connection: Connection, schema_name: str, entity: str, keys: list[str]
) -> dict[str, int]:
    query = sql.SQL("SELECT key, version FROM {} WHERE key = ANY(%s)")
    rows: Iterator[tuple[str, int]] = iter(
        connection.execute(query.format(_latest(schema_name, entity)), (keys,))
    )
    return dict(rows)


def _latest(schema_name: str, entity: str) -> sql.Identifier:
    return sql.Identifier(schema_name, physical(f"{entity}_latest"))
