"""What the core noted of single records; "applied" is the rule and is not written down."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
from psycopg import sql

from everstate.errors import HeldOverflow
from everstate.views.control.schema import Schema
from everstate.views.core import REFUSED, Held
from everstate.views.gate import HeldRow
from everstate.views.tables import Core
from everstate.views.trailing import Exceptions

_PLACE: Final = "entity = %s AND generation = %s AND partition = %s"


@dataclass(frozen=True, slots=True)
class WaitingKey:
    """A key whose changes wait."""

    entity: str
    key: str
    versions: tuple[int, ...]
    since: datetime


class Verdicts(Schema):
    """Held changes, duplicates and dead records."""

    def held_keys(self, core: Core, partition: int) -> set[str]:
        """Keys of a partition that have changes waiting."""
        query = sql.SQL(
            "SELECT DISTINCT key FROM {} WHERE " + _PLACE + " AND released_at IS NULL"
        ).format(self.table("held"))
        rows = self.connection.execute(query, (core.entity, core.generation, partition))
        return {key for (key,) in rows}

    def held(
        self, core: Core, partition: int, keys: Iterable[str]
    ) -> dict[str, dict[int, HeldRow]]:
        """Waiting changes of some keys."""
        query = sql.SQL(
            "SELECT key, version, change_id::text, row FROM {} WHERE "
            + _PLACE
            + " AND key = ANY(%s) AND released_at IS NULL"
        ).format(self.table("held"))
        found: dict[str, dict[int, HeldRow]] = {}
        place = (core.entity, core.generation, partition, list(keys))
        for key, version, change_id, row in self.connection.execute(query, place):
            found.setdefault(key, {})[version] = HeldRow(change_id, unpacked(row))
        return found

    def held_at(
        self, core: Core, partition: int, offsets: Iterable[int]
    ) -> list[tuple[tuple[str, int], pa.Table]]:
        """Waiting changes that were read at some offsets: key and version, planned change."""
        query = sql.SQL(
            "SELECT key, version, row FROM {} WHERE "
            + _PLACE
            + ' AND "offset" = ANY(%s) AND released_at IS NULL'
        ).format(self.table("held"))
        place = (core.entity, core.generation, partition, list(offsets))
        rows = self.connection.execute(query, place)
        return [((key, version), unpacked(row)) for key, version, row in rows]

    def hold(self, core: Core, partition: int, held: Sequence[Held]) -> None:
        """Note changes that wait; raises HeldOverflow when there would be more than allowed."""
        if not held:
            return
        values = []
        for each in held:
            key, version, offset, change_id = (
                each.change[name][0].as_py() for name in ("key", "version", "offset", "id")
            )
            place = (core.entity, core.generation, partition)
            row = (key, version, offset, change_id, packed(each.change), each.released_at)
            values.append((*place, *row))
        with self.connection.cursor() as cursor:
            cursor.executemany(
                sql.SQL(
                    "INSERT INTO {} (entity, generation, partition, key, version, "
                    '"offset", change_id, row, released_at) '
                    "VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)"
                ).format(self.table("held")),
                values,
            )
        query = sql.SQL("SELECT count(*) FROM {} WHERE entity = %s AND released_at IS NULL")
        counted = self.connection.execute(query.format(self.table("held")), (core.entity,))
        (waiting,) = counted.fetchone() or (0,)
        if waiting > core.held_max:
            raise HeldOverflow(core.entity, waiting, core.held_max)

    def release(self, core: Core, partition: int, released: Sequence[tuple[str, int, int]]) -> None:
        """Note what freed changes that waited: key, version, offset."""
        if not released:
            return
        query = sql.SQL(
            "UPDATE {} AS held SET released_at = freed.by FROM unnest(%s::text[], %s::bigint[], "
            "%s::bigint[]) AS freed(key, version, by) WHERE "
            + _PLACE
            + " AND held.key = freed.key AND held.version = freed.version"
        ).format(self.table("held"))
        keys, versions, offsets = zip(*released, strict=True)
        place = (core.entity, core.generation, partition)
        self.connection.execute(query, (list(keys), list(versions), list(offsets), *place))

    def forget_held(self, core: Core, partition: int, versions: Sequence[tuple[str, int]]) -> None:
        """Drop changes that waited and are dead."""
        query = sql.SQL(
            "DELETE FROM {} AS held USING unnest(%s::text[], %s::bigint[]) AS gone(key, version) "
            "WHERE " + _PLACE + " AND held.key = gone.key AND held.version = gone.version"
        ).format(self.table("held"))
        keys, numbers = [key for key, _ in versions], [version for _, version in versions]
        place = (core.entity, core.generation, partition)
        self.connection.execute(query, (keys, numbers, *place))

    def note_duplicates(self, core: Core, partition: int, runs: Sequence[tuple[int, int]]) -> None:
        """Note runs of duplicates: first and last offset."""
        if not runs:
            return
        query = sql.SQL(
            "INSERT INTO {} (entity, generation, partition, first_offset, last_offset) "
            "VALUES (%s, %s, %s, %s, %s) ON CONFLICT DO NOTHING"
        ).format(self.table("duplicate"))
        place = (core.entity, core.generation, partition)
        with self.connection.cursor() as cursor:
            cursor.executemany(query, [(*place, *run) for run in runs])

    def bury(
        self, core: Core, partition: int, changes: pa.Table, reasons: Sequence[tuple[int, str]]
    ) -> None:
        """Note records that cannot be read or applied; each place in the log once (law 7)."""
        if not reasons:
            return
        values = []
        for row, reason in reasons:
            fields = changes.slice(row, 1).select(
                ["offset", "key", "raw_key", "raw_value", "raw_headers"]
            )
            record = fields.to_pylist()[0]
            if record["raw_key"] is None and record["key"] is not None:
                # The pipeline leaves the key's bytes out where the key could be read.
                record["raw_key"] = record["key"].encode()
            headers = record["raw_headers"] or []
            values.append(
                (
                    *(core.topic, core.generation, partition, record["offset"], core.entity),
                    *(reason, record["raw_key"], record["raw_value"]),
                    [header["key"] for header in headers],
                    [header["value"] for header in headers],
                )
            )
        with self.connection.cursor() as cursor:
            cursor.executemany(
                sql.SQL(
                    'INSERT INTO {} (topic, generation, partition, "offset", entity, '
                    "reason, raw_key, raw_value, header_names, header_values) "
                    "VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s::bytea[]) "
                    "ON CONFLICT DO NOTHING"
                ).format(self.table("dead")),
                values,
            )

    def exceptions(self, core: Core, partition: int, start: int, end: int) -> Exceptions:
        """What was noted about a range that lies behind the core's position."""
        place = (core.entity, core.generation, partition, start, end)
        dead = self._offsets("dead", '"offset"', place)
        held = self._offsets("held", '"offset"', place)
        query = sql.SQL(
            "SELECT first_offset, last_offset FROM {} WHERE "
            + _PLACE
            + " AND last_offset >= %s AND first_offset < %s ORDER BY first_offset"
        ).format(self.table("duplicate"))
        duplicates = self.connection.execute(query, place).fetchall()
        query = sql.SQL(
            'SELECT "offset" FROM {} WHERE '
            + _PLACE
            + " AND released_at >= %s AND released_at < %s"
        ).format(self.table("held"))
        released = frozenset(offset for (offset,) in self.connection.execute(query, place))
        return Exceptions(dead, tuple(duplicates), held, released)

    def released_changes(
        self, core: Core, partition: int, start: int, end: int
    ) -> list[tuple[int, bytes, bytes]]:
        """Offset, key and message of changes that waited before a range and were freed in it."""
        query = sql.SQL(
            'SELECT "offset", row FROM {} WHERE '
            + _PLACE
            + ' AND released_at >= %s AND released_at < %s AND "offset" < %s ORDER BY "offset"'
        ).format(self.table("held"))
        place = (core.entity, core.generation, partition, start, end, start)
        found = []
        for offset, row in self.connection.execute(query, place):
            change = unpacked(row)
            key: str = change["key"][0].as_py()
            found.append((offset, key.encode(), change["raw_value"][0].as_py()))
        return found

    def refused_places(self, entity: str) -> dict[tuple[int, int], list[int]]:
        """Places of changes that `latest` refused: no archive knows that they are dead (C19)."""
        query = sql.SQL(
            'SELECT generation, partition, "offset" FROM {} WHERE entity = %s '
            "AND starts_with(reason, %s)"
        ).format(self.table("dead"))
        places: dict[tuple[int, int], list[int]] = {}
        for generation, partition, offset in self.connection.execute(query, (entity, REFUSED)):
            places.setdefault((generation, partition), []).append(offset)
        return places

    def trim(self, entity: str, generation: int, below: dict[int, int]) -> int:
        """Drop notes that nobody asks for any more: before these offsets. Dead ones stay (V4)."""
        gone = 0
        place = (entity, generation, list(below), list(below.values()))
        for table, column in (("held", "released_at"), ("duplicate", "last_offset")):
            query = sql.SQL(
                "DELETE FROM {} AS noted USING unnest(%s::int[], %s::bigint[]) "
                "AS passed(partition, below) WHERE entity = %s AND generation = %s "
                "AND noted.partition = passed.partition AND noted.{} < passed.below"
            ).format(self.table(table), sql.Identifier(column))
            gone += self.connection.execute(query, (*place[2:], *place[:2])).rowcount
        return gone

    def waiting(self, entity: str | None = None, key: str | None = None) -> list[WaitingKey]:
        """Keys whose changes wait; by entity type and key. Cost: a scan of what waits."""
        query = sql.SQL(
            "SELECT entity, key, array_agg(version ORDER BY version), min(held_at) FROM {} "
            "WHERE released_at IS NULL AND (%(entity)s::text IS NULL OR entity = %(entity)s) "
            "AND (%(key)s::text IS NULL OR key = %(key)s) "
            "GROUP BY entity, key ORDER BY entity, key"
        ).format(self.table("held"))
        rows = self.connection.execute(query, {"entity": entity, "key": key})
        return [WaitingKey(name, each, tuple(v), since) for name, each, v, since in rows]

    def waiting_change(self, entity: str, key: str, version: int) -> tuple[bytes, int, int] | None:
        """Message, generation and partition of a change that waits."""
        query = sql.SQL(
            "SELECT row, generation, partition FROM {} "
            "WHERE entity = %s AND key = %s AND version = %s AND released_at IS NULL"
        ).format(self.table("held"))
        row = self.connection.execute(query, (entity, key, version)).fetchone()
        if row is None:
            return None
        return unpacked(row[0])["raw_value"][0].as_py(), row[1], row[2]

    def _offsets(self, table: str, column: str, place: tuple[Any, ...]) -> frozenset[int]:
        query = sql.SQL(
            f"SELECT {column} FROM {{}} WHERE {_PLACE} AND {column} >= %s AND {column} < %s"
        ).format(self.table(table))
        return frozenset(offset for (offset,) in self.connection.execute(query, place))


def packed(change: pa.Table) -> bytes:
    """One planned change as Arrow IPC."""
    sink = pa.BufferOutputStream()
    # A slice would carry the buffers of the whole batch.
    own = change.take(pa.array([0])).combine_chunks()
    with pa.ipc.new_stream(sink, own.schema) as writer:
        writer.write_table(own)
    return bytes(sink.getvalue())


def unpacked(row: bytes) -> pa.Table:
    """The planned change that :func:`packed` made bytes of."""
    with pa.ipc.open_stream(row) as reader:
        return reader.read_all()
