"""Deletes of rows of which the log has no delete: after a TRUNCATE, or while nobody captured. Pure.

An entity is in the log, or its rows are held: a delete goes behind these, so that the entity is
deleted once they are released.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from heapq import merge
from itertools import groupby
from typing import Final

import msgspec

from everstate.changes.keys import EntityKey
from everstate.sources.cdc.absent import AbsentRows
from everstate.sources.cdc.balance import Cut, NumberedBatch
from everstate.sources.cdc.completion import ABSENT
from everstate.sources.cdc.holding import HeldEntity
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.rows import is_after
from everstate.sources.cdc.states import States

_DELETES_MAX: Final = 50_000
"""Most of these deletes in one batch, which is one transaction of Kafka."""
_TOO_MANY: Final = (
    "a snapshot lacks {lacks:,} of {of:,} entities, more than {percent} % "
    "(capture.deletes_max_percent), so they stay; "
    "`everstate cdc snapshot {capture} --new-epoch --yes {lacks}` deletes them"
)
HeldRows = Mapping[EntityKey, HeldEntity]
_decode: Final = msgspec.json.Decoder(dict[str, list[int | str]]).decode


def truncated(
    row: CleanRow, entity: str, states: States, held: HeldRows, cut: Cut
) -> Iterator[CleanRow]:
    """A delete of each entity of a truncated table whose newest row is before the truncation.

    They come in the order of their keys; those behind the last one before the cut only.
    """
    for key in _keys(entity, states, held, cut.key):
        newest = _newest(entity, key, states, held)
        if is_after(row.position, newest) is not False:  # type: ignore[arg-type]
            yield msgspec.structs.replace(row, op="d", key=key, columns={})


def too_many(
    capture: str,
    absent: AbsentRows,
    states: States,
    held: HeldRows,
    *,
    percent: int,
    may_delete: int,
) -> dict[str, str]:
    """Leave out the tables of whose entities the snapshot lacks more than this share and number.

    Out: what `cdc status` shows of each. Cost: one pass over the entities.
    """
    found = {}
    for table, entity in list(absent.tables.items()):
        keys = [key in absent.keys[entity] for key in _keys(entity, states, held, "")]
        lacks = keys.count(False)
        if lacks * 100 > len(keys) * percent and lacks > may_delete:
            facts = {"lacks": lacks, "of": len(keys), "percent": percent, "capture": capture}
            found[table] = _TOO_MANY.format(**facts)
            del absent.tables[table]
    return found


def lacking(
    absent: AbsentRows, epoch: int, states: States, held: HeldRows, cut: Cut
) -> Iterator[CleanRow]:
    """A delete of each entity that is missing in a first snapshot that was taken again.

    They come in the order of table and key; those behind the last one before the cut only.
    """
    position = {name: [epoch, *place] for name, place in _decode(absent.position).items()}
    for table, entity in sorted(absent.tables.items()):
        if table < cut.table:
            continue
        for key in _keys(entity, states, held, cut.key if table == cut.table else ""):
            if key not in absent.keys[entity]:
                yield CleanRow(
                    table=table,
                    op="d",
                    key=key,
                    columns={},
                    position=position,
                    time_us=absent.time_us,
                    is_snapshot=True,
                    provenance={"reason": ABSENT},
                )


def bounded(gone: Iterable[CleanRow], batch: NumberedBatch, cut: Cut) -> Iterator[CleanRow]:
    """The deletes that this batch may have; it gets their count, and a cut before the others."""
    for row in gone:
        if batch.added.total() >= _DELETES_MAX:
            batch.cut = cut
            return
        batch.added[row.table] += 1
        yield row
        cut = msgspec.structs.replace(cut, table=row.table, key=row.key)


def _keys(entity: str, states: States, held: HeldRows, after: str) -> Iterator[str]:
    """Keys of a type's entities that are in the log and not deleted, or of which rows are held."""
    waiting = [key for (name, key), one in held.items() if name == entity and one.rows]
    behind = sorted(key for key in waiting if key > after)
    for key, _ in groupby(merge(states.alive(entity, after), behind)):
        yield key


def _newest(entity: str, key: str, states: States, held: HeldRows) -> Mapping[str, list[int | str]]:
    """Position of the newest row of an entity; empty if it has none."""
    known, one = states.get(entity, key), held.get((entity, key))
    waiting = [] if one is None else [row.position for row in one.rows if row.position]
    return waiting[-1] if waiting else {} if known is None else known.position
