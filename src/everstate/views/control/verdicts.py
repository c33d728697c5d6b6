"""The core's verdicts on single records; the verdict "applied" is the rule and is not stored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import pyarrow as pa

from everstate.errors import DataLoss, HeldOverflow
from everstate.log.positions import Range
from everstate.postgres import Connection
from everstate.views.control.notes import Notes
from everstate.views.control.schema import Schema
from everstate.views.core import Applied, Held
from everstate.views.gate import CONFLICT, HeldRow
from everstate.views.misfits import MisfitCount
from everstate.views.tables import CORE_FINGERPRINT, Core, KeptTable
from everstate.views.trailing import Exceptions

_PLACE: Final = "entity = %s AND generation = %s AND partition = %s"


@dataclass(frozen=True, slots=True)
class WaitingKey:
    """A key with held changes."""

    entity: str
    key: str
    versions: tuple[int, ...]
    since: datetime


class CoreTables(Schema):
    """What the transaction of a core reads and writes of one partition in the control tables.

    See :class:`everstate.views.core.CoreTransaction`.
    """

    def __init__(
        self, connection: Connection, schema_name: str, core: Core, partition: int
    ) -> None:
        super().__init__(connection, schema_name)
        self.core, self.partition = core, partition

    @property
    def _place(self) -> tuple[str, int, int]:
        return (self.core.entity, self.core.generation, self.partition)

    def take(self, start: int, end: int) -> bool:
        """Compare and swap the core's position (C11); returns whether it was at ``start``."""
        place = (self.core.view, self.core.version, self.core.generation, self.partition)
        return self.run_one(
            "UPDATE {position} SET next_offset = %s, updated_at = now() WHERE view = %s "
            "AND version = %s AND generation = %s AND partition = %s AND next_offset = %s "
            "AND fingerprint = %s",
            (end, *place, start, CORE_FINGERPRINT),
        )

    def take_riders(self, riders: Sequence[KeptTable], start: int, end: int) -> set[str]:
        """Move the riders whose position is ``start``; returns the names of their tables.

        A rider whose position a trailing step has locked is skipped, without waiting.
        """
        lists = (
            [table.view for table in riders],
            [table.version for table in riders],
            [table.fingerprint for table in riders],
        )
        rows = self.run(
            "WITH mine AS (SELECT place.ctid FROM {position} AS place "
            "JOIN unnest(%s::text[], %s::int[], %s::text[]) AS wanted(view, version, fingerprint) "
            "USING (view, version, fingerprint) "
            "WHERE generation = %s AND partition = %s AND next_offset = %s "
            "FOR UPDATE OF place SKIP LOCKED) "
            "UPDATE {position} AS place SET next_offset = %s, updated_at = now() FROM mine "
            "WHERE place.ctid = mine.ctid RETURNING place.view, place.version",
            (*lists, *self._place[1:], start, end),
        )
        moved = set(rows.fetchall())
        return {table.name for table in riders if (table.view, table.version) in moved}

    def held_keys(self) -> set[str]:
        """Keys of the partition with held changes."""
        query = "SELECT DISTINCT key FROM {held} WHERE " + _PLACE + " AND released_at IS NULL"
        return {key for (key,) in self.run(query, self._place)}

    def held(self, keys: Iterable[str]) -> dict[str, dict[int, HeldRow]]:
        """Held changes of some keys, by key and version."""
        rows = self.run(
            "SELECT key, version, change_id::text, row FROM {held} WHERE "
            + _PLACE
            + " AND key = ANY(%s) AND released_at IS NULL",
            (*self._place, list(keys)),
        )
        found: dict[str, dict[int, HeldRow]] = {}
        for key, version, change_id, row in rows:
            found.setdefault(key, {})[version] = HeldRow(change_id, unpacked(row))
        return found

    def held_at(self, offsets: Iterable[int]) -> list[tuple[tuple[str, int], pa.Table]]:
        """Held changes whose records are at some offsets: key and version, planned change."""
        rows = self.run(
            "SELECT key, version, row FROM {held} WHERE "
            + _PLACE
            + ' AND "offset" = ANY(%s) AND released_at IS NULL',
            (*self._place, list(offsets)),
        )
        return [((key, version), unpacked(row)) for key, version, row in rows]

    def hold(self, held: Sequence[Held]) -> None:
        """Store held changes; raises HeldOverflow when there would be more than allowed."""
        if not held:
            return
        values = []
        for each in held:
            key, version, offset, change_id = (
                each.change[name][0].as_py() for name in ("key", "version", "offset", "id")
            )
            # A slice would serialize the buffers of the whole batch.
            own = each.change.take(pa.array([0])).combine_chunks()
            row = (key, version, offset, change_id, packed(own), each.released_at)
            values.append((*self._place, *row))
        self.run_each(
            "INSERT INTO {held} (entity, generation, partition, key, version, "
            '"offset", change_id, row, released_at) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)',
            values,
        )
        query = "SELECT count(*) FROM {held} WHERE entity = %s AND released_at IS NULL"
        waiting: int = self.value(query, (self.core.entity,))
        if waiting > self.core.held_max:
            raise HeldOverflow(self.core.entity, waiting, self.core.held_max)

    def release(self, released: Sequence[tuple[str, int, int]]) -> None:
        """Mark held changes as released: key, version, offset of the change that released it."""
        if not released:
            return
        self.run(
            "UPDATE {held} AS held SET released_at = released.by FROM unnest(%s::text[], "
            "%s::bigint[], %s::bigint[]) AS released(key, version, by) WHERE "
            + _PLACE
            + " AND held.key = released.key AND held.version = released.version",
            (*map(list, zip(*released, strict=True)), *self._place),
        )

    def forget(self, versions: Sequence[tuple[str, int]]) -> None:
        """Delete held changes that are dead."""
        self.run(
            "DELETE FROM {held} AS held USING unnest(%s::text[], %s::bigint[]) "
            "AS gone(key, version) "
            "WHERE " + _PLACE + " AND held.key = gone.key AND held.version = gone.version",
            ([key for key, _ in versions], [version for _, version in versions], *self._place),
        )

    def note_duplicates(self, runs: Sequence[tuple[int, int]]) -> None:
        """Store runs of duplicates: first and last offset."""
        if not runs:
            return
        self.run_each(
            "INSERT INTO {duplicate} (entity, generation, partition, first_offset, last_offset) "
            "VALUES (%s, %s, %s, %s, %s) ON CONFLICT DO NOTHING",
            [(*self._place, *run) for run in runs],
        )

    def dead_letter(self, changes: pa.Table, reasons: Sequence[tuple[int, str]]) -> None:
        """Store dead records: unreadable or not applicable; each place in the log once (law 7)."""
        if not reasons:
            return
        values = []
        for row, reason in reasons:
            fields = changes.slice(row, 1).select(
                ["offset", "key", "raw_key", "raw_value", "raw_headers"]
            )
            record = fields.to_pylist()[0]
            if record["raw_key"] is None and record["key"] is not None:
                # The pipeline omits the key's bytes of records whose key could be read.
                record["raw_key"] = record["key"].encode()
            headers = record["raw_headers"] or []
            values.append(
                (
                    *(self.core.topic, self.core.generation, self.partition),
                    *(record["offset"], self.core.entity),
                    *(reason, record["raw_key"], record["raw_value"]),
                    [header["key"] for header in headers],
                    [header["value"] for header in headers],
                )
            )
        self.run_each(
            'INSERT INTO {dead} (topic, generation, partition, "offset", entity, '
            "reason, raw_key, raw_value, header_names, header_values) "
            "VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s::bytea[]) ON CONFLICT DO NOTHING",
            values,
        )

    def note_misfits(self, found: Sequence[MisfitCount]) -> None:
        """Add to the counts of values that do not fit the model."""
        self.run_each(
            "INSERT INTO {misfit} AS known (entity, generation, partition, field, schema_version, "
            "count, first_offset, last_offset) VALUES (%s, %s, %s, %s, %s, %s, %s, %s) "
            "ON CONFLICT (entity, generation, partition, field, schema_version) DO UPDATE SET "
            "count = known.count + excluded.count, "
            "first_offset = least(known.first_offset, excluded.first_offset), "
            "last_offset = greatest(known.last_offset, excluded.last_offset), seen_at = now()",
            [(*self._place, *each) for each in found],
        )

    def count(self, applied: Applied) -> None:
        """Add to the counters (law 7)."""
        waiting = applied.held - applied.released
        gained = (applied.applied, applied.duplicate, waiting, applied.dead)
        self.run(
            "UPDATE {counters} SET applied = applied + %s, duplicate = duplicate + %s, "
            "held = held + %s, dead = dead + %s WHERE " + _PLACE,
            (*gained, *self._place),
        )


class Verdicts(Notes):
    """The tables of held changes, duplicates and dead records, for all partitions."""

    def exceptions(self, core: Core, partition: int, start: int, end: int) -> Exceptions:
        """The core's exceptions in a range before its position."""
        return self.judged(core, {partition: Range(start, end)})[partition].exceptions

    def released_changes(
        self, core: Core, partition: int, start: int, end: int, *, known: Collection[int] = ()
    ) -> list[tuple[int, bytes, bytes]]:
        """Offset, key and message of changes held before a range and released in it.

        ``known``: offsets that are left out. Raises DataLoss when the bytes of another one were
        trimmed.
        """
        rows = self.run(
            'SELECT "offset", row FROM {held} WHERE '
            + _PLACE
            + ' AND released_at >= %s AND released_at < %s AND "offset" < %s ORDER BY "offset"',
            (core.entity, core.generation, partition, start, end, start),
        )
        found = []
        for offset, row in rows:
            if offset in known:
                continue
            if not row:
                raise DataLoss(
                    f"the change of {core.entity} that was held at offset {offset:,} of partition "
                    f"{partition} was released, and its bytes were trimmed.",
                    advice="Build the view again: `everstate views rebuild`.",
                )
            change = unpacked(row)
            key: str = change["key"][0].as_py()
            found.append((offset, key.encode(), change["raw_value"][0].as_py()))
        return found

    def trimmed(self, core: Core, partition: int, start: int, end: int) -> set[int]:
        """Offsets in a range of changes released behind it whose bytes were trimmed."""
        query = (
            'SELECT "offset" FROM {held} WHERE '
            + _PLACE
            + ' AND "offset" >= %s AND "offset" < %s AND released_at >= %s AND row = \'\''
        )
        place = (core.entity, core.generation, partition)
        return {offset for (offset,) in self.run(query, (*place, start, end, end))}

    def is_holding(self, entity: str, generation: int, partition: int, end: int) -> bool:
        """Whether changes before an offset are held, or were released behind it."""
        return bool(
            self.value(
                "SELECT EXISTS (SELECT FROM {held} WHERE "
                + _PLACE
                + ' AND "offset" < %s AND coalesce(released_at >= %s, true))',
                (entity, generation, partition, end, end),
            )
        )

    def dead_places(self, entity: str) -> dict[tuple[int, int], list[int]]:
        """Places of records that the core could not read, or that `latest` refused (V5).

        Conflicts are left out: of two records with one version a batch also uses the first.
        """
        query = (
            'SELECT generation, partition, "offset" FROM {dead} WHERE entity = %s AND reason <> %s'
        )
        places: dict[tuple[int, int], list[int]] = {}
        for generation, partition, offset in self.run(query, (entity, CONFLICT)):
            places.setdefault((generation, partition), []).append(offset)
        return places

    def trim(self, entity: str, generation: int, below: dict[int, int]) -> int:
        """Delete the bytes of held changes that were released before these offsets (V3, V4).

        The rows themselves stay: with them the accepted changes of any past range can be
        determined. Returns how many were trimmed.
        """
        trimmed = self.run(
            "UPDATE {held} AS recorded SET row = '' FROM unnest(%s::int[], %s::bigint[]) "
            "AS passed(partition, below) WHERE entity = %s AND generation = %s "
            "AND recorded.partition = passed.partition AND released_at < below "
            "AND octet_length(row) > 0",
            (list(below), list(below.values()), entity, generation),
        )
        return trimmed.rowcount

    def waiting(self, entity: str | None = None, key: str | None = None) -> list[WaitingKey]:
        """Keys with held changes, by entity type and key. Cost: a scan of the held changes."""
        rows = self.run(
            "SELECT entity, key, array_agg(version ORDER BY version), min(held_at) FROM {held} "
            "WHERE released_at IS NULL AND (%(entity)s::text IS NULL OR entity = %(entity)s) "
            "AND (%(key)s::text IS NULL OR key = %(key)s) "
            "GROUP BY entity, key ORDER BY entity, key",
            {"entity": entity, "key": key},
        )
        return [WaitingKey(name, each, tuple(v), since) for name, each, v, since in rows]

    def waiting_change(self, entity: str, key: str, version: int) -> tuple[bytes, int, int] | None:
        """Message, generation and partition of a held change; ``None``: it is not held."""
        row = self.run(
            "SELECT row, generation, partition FROM {held} "
            "WHERE entity = %s AND key = %s AND version = %s AND released_at IS NULL",
            (entity, key, version),
        ).fetchone()
        if row is None:
            return None
        return unpacked(row[0])["raw_value"][0].as_py(), row[1], row[2]


def packed(changes: pa.Table, compression: str | None = None) -> bytes:
    """Planned changes as Arrow IPC."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, changes.schema, options=options) as writer:
        writer.write_table(changes)
    return bytes(sink.getvalue())


def unpacked(row: bytes) -> pa.Table:
    """The planned changes from their bytes as Arrow IPC."""
    with pa.ipc.open_stream(row) as reader:
        return reader.read_all()
