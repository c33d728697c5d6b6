"""The table of misfits; each partition has rows of its own, so that no two tasks wait."""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import sql

from everstate.views.control.schema import Schema
from everstate.views.misfits import Misfit, MisfitCount
from everstate.views.tables import Core


class Misfits(Schema):
    """Values of accepted states that did not fit the model when the core read them."""

    def add_misfits(self, core: Core, partition: int, found: Sequence[MisfitCount]) -> None:
        """Add to the counts of a partition."""
        query = sql.SQL(
            "INSERT INTO {} AS known (entity, generation, partition, field, schema_version, count, "
            "first_offset, last_offset) VALUES (%s, %s, %s, %s, %s, %s, %s, %s) "
            "ON CONFLICT (entity, generation, partition, field, schema_version) DO UPDATE SET "
            "count = known.count + excluded.count, "
            "first_offset = least(known.first_offset, excluded.first_offset), "
            "last_offset = greatest(known.last_offset, excluded.last_offset), seen_at = now()"
        ).format(self.table("misfit"))
        place = (core.entity, core.generation, partition)
        with self.connection.cursor() as cursor:
            cursor.executemany(query, [(*place, *each) for each in found])

    def misfits(self, entity: str | None = None) -> list[Misfit]:
        """Misfits by entity type, field and schema version, over all partitions."""
        query = sql.SQL(
            "SELECT entity, field, schema_version, sum(count)::bigint, "
            "min(ARRAY[generation, partition, first_offset]), "
            "max(ARRAY[generation, partition, last_offset]), "
            "extract(epoch FROM now() - max(seen_at))::float8 FROM {} "
            "WHERE %(entity)s::text IS NULL OR entity = %(entity)s "
            "GROUP BY entity, field, schema_version ORDER BY entity, field, schema_version"
        ).format(self.table("misfit"))
        return [
            Misfit(
                name,
                field,
                version,
                count,
                "/".join(map(str, first)),
                "/".join(map(str, last)),
                max(0.0, age_s),
            )
            for name, field, version, count, first, last, age_s in self.connection.execute(
                query, {"entity": entity}
            )
        ]
