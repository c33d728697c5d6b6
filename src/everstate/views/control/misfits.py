"""The table of misfits; each partition has rows of its own, so that no two tasks wait."""

from __future__ import annotations

from psycopg import sql

from everstate.views.control.schema import Schema
from everstate.views.misfits import Misfit


class Misfits(Schema):
    """Values of accepted states that did not fit the model when the core read them."""

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
