"""Deletes of rows of which the log has no delete: after a TRUNCATE, or while nobody captured. Pure.

An entity is in the log, or its rows are held: a delete goes behind these, so that the entity is
deleted once they are released.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from everstate.changes.keys import EntityKey
from everstate.sources.cdc.absent import AbsentRows
from everstate.sources.cdc.completion import ABSENT
from everstate.sources.cdc.holding import HeldEntity
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.rows import is_after
from everstate.sources.cdc.states import States

HeldRows = Mapping[EntityKey, HeldEntity]
_decode: Final = msgspec.json.Decoder(dict[str, list[int | str]]).decode


def truncated(row: CleanRow, entity: str, states: States, held: HeldRows) -> Iterator[CleanRow]:
    """A delete of each entity of a truncated table whose newest row is before the truncation."""
    for key in _keys(entity, states, held):
        newest = _newest(entity, key, states, held)
        if is_after(row.position, newest) is not False:  # type: ignore[arg-type]
            yield msgspec.structs.replace(row, op="d", key=key, columns={})


def lacking(absent: AbsentRows, epoch: int, states: States, held: HeldRows) -> Iterator[CleanRow]:
    """A delete of each entity that is missing in a first snapshot that was taken again."""
    position = {name: [epoch, *place] for name, place in _decode(absent.position).items()}
    for table, entity in absent.tables.items():
        for key in _keys(entity, states, held):
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


def _keys(entity: str, states: States, held: HeldRows) -> list[str]:
    """Keys of a type's entities that are in the log and not deleted, or of which rows are held."""
    waiting = [key for (name, key), one in held.items() if name == entity and one.rows]
    return list(dict.fromkeys([*states.alive(entity), *waiting]))


def _newest(entity: str, key: str, states: States, held: HeldRows) -> Mapping[str, list[int | str]]:
    """Position of the newest row of an entity; empty if it has none."""
    known, one = states.get(entity, key), held.get((entity, key))
    waiting = [] if one is None else [row.position for row in one.rows if row.position]
    return waiting[-1] if waiting else {} if known is None else known.position
