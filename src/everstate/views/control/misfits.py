"""The table of misfits; each partition has rows of its own, so that no two tasks wait."""

from __future__ import annotations

from collections.abc import Sequence

from everstate.views.control.schema import Schema
from everstate.views.misfits import Misfit


class Misfits(Schema):
    """Values of accepted states that did not fit the model when the core read them."""

    def misfits(self, entity: str | None = None) -> list[Misfit]:
        """Misfits by entity type, field and schema version, over all partitions."""
        rows = self.run(
            "SELECT entity, field, schema_version, sum(count)::bigint, "
            "min(ARRAY[generation, partition, first_offset]), "
            "max(ARRAY[generation, partition, last_offset]), "
            "extract(epoch FROM now() - max(seen_at))::float8 FROM {misfit} "
            "WHERE %(entity)s::text IS NULL OR entity = %(entity)s "
            "GROUP BY entity, field, schema_version ORDER BY entity, field, schema_version",
            {"entity": entity},
        )
        return [
            Misfit(name, field, version, count, _slashed(first), _slashed(last), max(0.0, age_s))
            for name, field, version, count, first, last, age_s in rows
        ]


def _slashed(place: Sequence[int]) -> str:
    return "/".join(map(str, place))
