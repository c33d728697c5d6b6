"""The state of the views, for readers and commands, without Arrow and Kafka."""

from __future__ import annotations

from everstate.views.control.positions import Positions
from everstate.views.control.registry import Registry
from everstate.views.misfits import Misfit, slashed


class ViewStatuses(Positions, Registry):
    """Versions of views, their positions, their deferred changes, and misfits."""

    def deferred(
        self, view: str | None = None
    ) -> dict[tuple[str, int], dict[tuple[int, int], tuple[int, int]]]:
        """How many changes of a view, or of all, are deferred, and the first offset of them.

        By view and version, and by generation and partition.
        """
        rows = self.run(
            "SELECT view, version, generation, partition, sum(changes)::bigint, min(first_offset) "
            "FROM {deferred} "
            + ("" if view is None else "WHERE view = %(view)s ")
            + "GROUP BY view, version, generation, partition",
            {"view": view},
        )
        found: dict[tuple[str, int], dict[tuple[int, int], tuple[int, int]]] = {}
        for view, version, generation, partition, changes, first in rows:
            found.setdefault((view, version), {})[generation, partition] = (changes, first)
        return found

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
            Misfit(name, field, version, count, slashed(first), slashed(last), max(0.0, age_s))
            for name, field, version, count, first, last, age_s in rows
        ]
