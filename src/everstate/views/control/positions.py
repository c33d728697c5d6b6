"""One position per view: the next offset, exclusive, of each partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from everstate.views.control.schema import Schema
from everstate.views.tables import (
    CORE_FINGERPRINT,
    Core,
    KeptTable,
    Vector,
    latest_of,
    physical,
)

if TYPE_CHECKING:
    from everstate.log.positions import Range

_PLACE: Final = "view = %s AND version = %s AND generation = %s AND partition = %s"


@dataclass(frozen=True, slots=True)
class ViewPosition:
    """The position of one version of a view in one partition."""

    view: str
    version: int
    entity: str
    generation: int
    partition: int
    next_offset: int
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts of the records before a position, by verdict: each is in exactly one (law 7)."""

    applied: int
    duplicate: int
    held: int
    dead: int

    @property
    def total(self) -> int:
        """Records that were read."""
        return self.applied + self.duplicate + self.held + self.dead


class Positions(Schema):
    """The tables of positions and of counted records."""

    def positions(self, entity: str | None = None) -> list[ViewPosition]:
        """Positions of all versions of views, of one entity type or of all, in order."""
        rows = self.run(
            "SELECT view, version, entity, generation, partition, next_offset, updated_at "
            "FROM {position} WHERE %(entity)s::text IS NULL OR entity = %(entity)s "
            "ORDER BY view, version, generation, partition",
            {"entity": entity},
        )
        return [ViewPosition(*row) for row in rows]

    def vector(self, view: str, version: int, generation: int = 1) -> dict[int, int]:
        """Positions of one version of a view by partition; empty: it has none."""
        rows = self.run(
            "SELECT partition, next_offset FROM {position} "
            "WHERE view = %s AND version = %s AND generation = %s ORDER BY partition",
            (view, version, generation),
        )
        return dict(rows.fetchall())

    def core_vector(self, entity: str) -> dict[int, int]:
        """Positions of the core of an entity type."""
        return self.vector(latest_of(entity), 1)

    def accepted(self, entity: str, key: str) -> tuple[int, int, int, int] | None:
        """The version of a key that the core has accepted; ``None``: it has accepted none.

        With its generation and partition, and the core's position there, read in one statement.
        """
        row: tuple[int, int, int, int] | None = self.run(
            "SELECT latest.version, place.generation, place.partition, place.next_offset "
            f"FROM {self.table(latest_of(entity))} AS latest "
            "JOIN {position} AS place USING (generation, partition) "
            "WHERE latest.key = %s AND place.view = %s",
            (key, latest_of(entity)),
        ).fetchone()
        return row

    def dead_among(
        self, entity: str, generation: int, partition: int, offsets: Sequence[int]
    ) -> set[int]:
        """Which of these offsets have a record that could not be read or applied."""
        rows = self.run(
            'SELECT "offset" FROM {dead} WHERE entity = %s AND generation = %s AND partition = %s '
            'AND "offset" = ANY(%s)',
            (entity, generation, partition, list(offsets)),
        )
        return {offset for (offset,) in rows}

    def open_core(self, entity: str, partitions: Sequence[int]) -> None:
        """Create positions and counters of a core where they are missing."""
        place = (latest_of(entity), 1, entity, CORE_FINGERPRINT)
        self.open_positions(*place, dict.fromkeys(partitions, 0))
        self.run_each(
            "INSERT INTO {counters} (entity, generation, partition) VALUES (%s, 1, %s) "
            "ON CONFLICT DO NOTHING",
            [(entity, partition) for partition in partitions],
        )

    def open_positions(
        self, view: str, version: int, entity: str, fingerprint: str, vector: Vector
    ) -> None:
        """Create positions of a version of a view; existing ones stay."""
        self.run_each(
            "INSERT INTO {position} (view, version, entity, generation, partition, next_offset, "
            "fingerprint) VALUES (%s, %s, %s, 1, %s, %s, %s) ON CONFLICT DO NOTHING",
            [
                (view, version, entity, partition, offset, fingerprint)
                for partition, offset in vector.items()
            ],
        )

    def close_positions(self, view: str, version: int) -> None:
        """Delete a version's positions and deferred changes: it is not kept any more."""
        for table in ("{position}", "{deferred}"):
            self.run(f"DELETE FROM {table} WHERE view = %s AND version = %s", (view, version))

    def writing(
        self, view: str, version: int, partition: int | None = None, *, waits: bool = False
    ) -> AbstractContextManager[bool]:
        """Let nobody else write rows of a partition to a version in another store; see `duty`.

        ``None``: let nobody else drop its tables. No row of a control table is locked, so that no
        start and no core waits for that store.
        """
        return self.duty(f"rows of {physical(view, version)} {partition}", waits=waits)

    def hold_view(self, table: KeptTable, generation: int, partition: int) -> bool:
        """Lock a view's position until the transaction ends; returns whether it is of this plan."""
        return self.run_one(
            "SELECT FROM {position} WHERE " + _PLACE + " AND fingerprint = %s FOR UPDATE",
            (table.view, table.version, generation, partition, table.fingerprint),
        )

    def take_view(
        self, table: KeptTable, generation: int, partition: int, start: int, end: int
    ) -> bool:
        """Compare and swap the position of one view (V10); returns whether it was at ``start``.

        A version that moves by itself was behind its core, so the record that it has caught up is
        cleared: readers whose snapshots began meanwhile would see older rows under it (V13).
        """
        place = (table.view, table.version, generation, partition)
        return self.run_one(
            "WITH moved AS (UPDATE {position} SET next_offset = %s, updated_at = now() "
            "WHERE "
            + _PLACE
            + " AND next_offset = %s AND fingerprint = %s RETURNING view, version), "
            "lagged AS (UPDATE {view} AS row SET met_at = NULL FROM moved "
            "WHERE row.name = moved.view "
            "AND row.version = moved.version AND row.met_at IS NOT NULL) SELECT FROM moved",
            (end, *place, start, table.fingerprint),
        )

    def core_position(self, core: Core, partition: int, *, hold: bool = False) -> int | None:
        """The core's position, if it has one; ``hold`` locks it until the transaction ends (V7)."""
        position: int | None = self.value(
            "SELECT next_offset FROM {position} WHERE "
            + _PLACE
            + " AND fingerprint = %s"
            + (" FOR SHARE" if hold else ""),
            (core.view, core.version, core.generation, partition, CORE_FINGERPRINT),
        )
        return position

    def hold_deferred(self, core: Core, table: KeptTable, *, waits: bool) -> int | None:
        """The partition of a view's oldest deferred change; locks the core's position there.

        Of the partitions in which the view's position is of this plan. Without ``waits`` a
        partition that the core is writing just now is passed over.
        """
        partition: int | None = self.value(
            "SELECT partition FROM {position} AS place, LATERAL (SELECT id FROM {deferred} AS part "
            "WHERE (part.view, part.version) = (%s, %s) AND part.generation = place.generation "
            "AND part.partition = place.partition ORDER BY id LIMIT 1) AS oldest "
            "WHERE view = %s AND version = %s AND generation = %s AND fingerprint = %s "
            "AND EXISTS (SELECT FROM {position} AS own WHERE own.view = %s AND own.version = %s "
            "AND own.generation = place.generation AND own.partition = place.partition "
            "AND own.fingerprint = %s) "
            "ORDER BY oldest.id LIMIT 1 FOR SHARE OF place" + ("" if waits else " SKIP LOCKED"),
            (
                *(table.view, table.version),
                *(core.view, core.version, core.generation, CORE_FINGERPRINT),
                *(table.view, table.version, table.fingerprint),
            ),
        )
        return partition

    def advance(self, core: Core, ranges: Mapping[int, Range]) -> None:
        """Move the core, and the riders at its position, past ranges without records (V8).

        Only for ranges in which the log served no record (C12). Ranges that begin past the position
        change nothing.
        """
        self.run(
            "WITH wanted AS (SELECT * FROM unnest(%s::int[], %s::bigint[], %s::bigint[]) "
            "AS wanted(partition, from_offset, to_offset)), "
            "before AS (SELECT partition, next_offset FROM {position} "
            "JOIN wanted USING (partition) WHERE view = %s AND version = %s AND generation = %s "
            "AND fingerprint = %s AND next_offset >= from_offset AND next_offset < to_offset "
            "FOR UPDATE) "
            "UPDATE {position} AS place SET next_offset = wanted.to_offset, updated_at = now() "
            "FROM wanted JOIN before USING (partition) WHERE place.entity = %s "
            "AND place.generation = %s AND place.partition = wanted.partition "
            "AND place.next_offset = before.next_offset AND (place.view = %s "
            "OR (place.view, place.version, place.fingerprint) IN ("
            "SELECT * FROM unnest(%s::text[], %s::int[], %s::text[])))",
            (
                list(ranges),
                [given.start for given in ranges.values()],
                [given.end for given in ranges.values()],
                *(core.view, core.version, core.generation, CORE_FINGERPRINT),
                *(core.entity, core.generation, core.view),
                [table.view for table in core.riders],
                [table.version for table in core.riders],
                [table.fingerprint for table in core.riders],
            ),
        )

    def counters(self, entity: str) -> Counters:
        """The counters of an entity type, summed over its partitions."""
        rows = self.run(
            "SELECT coalesce(sum(applied), 0)::bigint, coalesce(sum(duplicate), 0)::bigint, "
            "coalesce(sum(held), 0)::bigint, coalesce(sum(dead), 0)::bigint "
            "FROM {counters} WHERE entity = %s",
            (entity,),
        )
        (row,) = rows
        return Counters(*row)
