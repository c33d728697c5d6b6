"""Version gaps in the views: keys whose later changes are held because a version is missing."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime

from everstate.errors import NoGap
from everstate.views.control import Control
from everstate.views.tables import latest_of, physical


@dataclass(frozen=True, slots=True)
class Gap:
    """A key whose changes are held because a version before them is missing."""

    entity: str
    key: str
    expected_version: int
    """The version that is missing; the views have the one before it."""
    held_versions: tuple[int, ...]
    """Versions that are held."""
    since: datetime
    """When the first of them was held."""
    views: tuple[str, ...]
    """Views that lack the held changes, `latest` and `history` among them."""

    @property
    def missing(self) -> range:
        """Versions between the newest one in the views and the first held one."""
        return range(self.expected_version, self.held_versions[0])


@dataclass(frozen=True, slots=True)
class GapEdges:
    """Both sides of a gap: the state before it as JSON text, and the message after it."""

    before: str | None
    """The key's newest state; ``None``: it does not exist, or is deleted."""
    after: bytes
    """The message of the first held change, byte-exact."""
    generation: int
    partition: int


def read_gaps(control: Control, entity: str | None = None, key: str | None = None) -> list[Gap]:
    """Gaps of all entity types, of one, or of one key; by entity type and key.

    Cost: a scan of the held changes, which ``pipeline.held_max`` bounds.
    """
    by_entity = defaultdict(list)
    for waiting in control.waiting(entity, key):
        by_entity[waiting.entity].append(waiting)
    found: list[Gap] = []
    for name, keys in by_entity.items():
        latest = control.table(physical(latest_of(name)))
        query = f"SELECT key, version FROM {latest} WHERE key = ANY(%s)"
        newest = dict(control.run(query, ([each.key for each in keys],)))
        views = tuple(sorted(row.name for row in control.versions(entity=name) if row.published))
        for each in keys:
            version = newest.get(each.key, 0)
            later = tuple(v for v in each.versions if v > version)
            if later and later[0] > version + 1:
                found.append(Gap(name, each.key, version + 1, later, each.since, views))
    return found


def read_edges(control: Control, gap: Gap) -> GapEdges:
    """Both sides of a gap; raises NoGap when it was filled meanwhile."""
    waiting = control.waiting_change(gap.entity, gap.key, gap.held_versions[0])
    latest = control.table(physical(latest_of(gap.entity)))
    query = f"SELECT version, state::text FROM {latest} WHERE key = %s"
    version, state = control.run(query, (gap.key,)).fetchone() or (0, None)
    if waiting is None or version + 1 != gap.expected_version:
        raise NoGap(gap.entity, gap.key)
    after, generation, partition = waiting
    return GapEdges(state, after, generation, partition)
