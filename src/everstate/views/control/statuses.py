"""The state of the views, for readers and commands, without Arrow and Kafka."""

from __future__ import annotations

from collections.abc import Sequence

from everstate.views.control.positions import Positions
from everstate.views.control.registry import Registry
from everstate.views.misfits import Misfit


class ViewStatuses(Positions, Registry):
    """Versions of views, their positions, their deferred changes, and misfits."""

    def deferred_counts(self) -> dict[tuple[str, int], dict[int, int]]:
        """How many changes are deferred, by view and version, and by partition."""
        rows = self.run(
            "SELECT view, version, partition, sum(changes)::bigint FROM {deferred} "
            "GROUP BY view, version, partition ORDER BY view, version, partition"
        )
        found: dict[tuple[str, int], dict[int, int]] = {}
        for view, version, partition, changes in rows:
            found.setdefault((view, version), {})[partition] = changes
        return found

    def deferred_first(self, view: str, version: int) -> dict[tuple[int, int], int]:
        """The first offset that a version has deferred, by generation and partition."""
        rows = self.run(
            "SELECT generation, partition, min(first_offset) FROM {deferred} WHERE view = %s "
            "AND version = %s GROUP BY generation, partition",
            (view, version),
        )
        return {(generation, partition): first for generation, partition, first in rows}

    def misfits(self) -> list[Misfit]:
        """Misfits by entity type, field and schema version, over all partitions."""
        # Each partition has rows of its own, so that no two tasks wait.
        rows = self.run(
            "SELECT entity, field, schema_version, sum(count)::bigint, "
            "min(ARRAY[generation, partition, first_offset]), "
            "max(ARRAY[generation, partition, last_offset]), "
            "extract(epoch FROM now() - max(seen_at))::float8 FROM {misfit} "
            "GROUP BY entity, field, schema_version ORDER BY entity, field, schema_version"
        )
        return [
            Misfit(name, field, version, count, _slashed(first), _slashed(last), max(0.0, age_s))
            for name, field, version, count, first, last, age_s in rows
        ]


def _slashed(place: Sequence[int]) -> str:
    return "/".join(map(str, place))
