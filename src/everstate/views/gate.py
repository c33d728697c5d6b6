"""The version gate: decides the verdict on each change, before anything is summed (law 2, C13).

Pure: the store reads the gate's rows, this module decides which changes apply, are held, are
duplicates or are dead. Keys with consecutive versions, nearly always all of them, are decided with
array operations; the others one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Final
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NO_VERSION: Final = -1
"""First version that is staged for a key whose gate row must be read."""

CONFLICT: Final = "conflict"


@dataclass(frozen=True, slots=True)
class GateRow:
    """Newest applied version of a key; version 0 and no id when the key was never seen."""

    version: int = 0
    change_id: str | None = None
    as_of: datetime | None = None


@dataclass(frozen=True, slots=True)
class HeldRow:
    """A held change: its id, and its planned row."""

    change_id: str
    row: pa.Table


class Keys:
    """Changes of one partition grouped by key; ``changes`` are readable and in offset order."""

    def __init__(self, changes: pa.Table) -> None:
        self.changes = changes
        encoded = changes["key"].combine_chunks().dictionary_encode()
        # Keys are sorted, because tables and their indexes are written in the order of the keys.
        order = pc.array_sort_indices(encoded.dictionary)
        self.names: pa.Array = encoded.dictionary.take(order)
        ranks = np.empty(len(order), dtype=np.int64)
        ranks[order.to_numpy()] = np.arange(len(order))
        codes = ranks[encoded.indices.to_numpy(zero_copy_only=False)]
        self.versions: Ints = changes["version"].to_numpy()
        self.occurred: Ints = pc.cast(changes["occurred_at"], pa.int64()).to_numpy()
        # Rows by key, and in offset order within a key. Codes count the names from 0 without a
        # hole, so the nth start is that of the nth name.
        self.order: Ints = np.argsort(codes, kind="stable")
        self.codes: Ints = codes[self.order]
        starts = np.ones(len(codes) + 1, dtype=np.bool_)
        starts[1:-1] = self.codes[1:] != self.codes[:-1]
        (bounds,) = starts.nonzero()
        self.starts: Ints = bounds[:-1]
        self.ends: Ints = bounds[1:]

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def hashes(self) -> npt.NDArray[np.uint32]:
        """A hash of each key, the same in every process."""
        names = self.names.to_pylist()
        hashed = (crc32(name.encode()) for name in names)
        return np.fromiter(hashed, dtype=np.uint32, count=len(names))

    @cached_property
    def by_row(self) -> Ints:
        """The code of each row's key."""
        codes = np.empty_like(self.codes)
        codes[self.order] = self.codes
        return codes

    @property
    def firsts(self) -> Ints:
        """Row of the first change of each key."""
        return self.order[self.starts]

    @property
    def lasts(self) -> Ints:
        """Row of the last change of each key."""
        return self.order[self.ends - 1]

    def dense(self) -> Bools:
        """Whether each key's versions are consecutive within these changes."""
        versions = self.versions[self.order]
        broken = np.zeros(len(versions), dtype=np.int64)
        broken[1:] = (versions[1:] != versions[:-1] + 1) & (self.codes[1:] == self.codes[:-1])
        if not len(versions):
            return np.zeros(0, dtype=np.bool_)
        dense: Bools = np.add.reduceat(broken, self.starts) == 0
        return dense

    def codes_of(self, names: Iterable[str]) -> list[int | None]:
        """The code of each name's key, ``None`` for a name without a change here."""
        codes = pc.index_in(pa.array(list(names), self.names.type), self.names)
        found: list[int | None] = codes.to_pylist()
        return found

    def rows_of(self, key: int) -> Ints:
        """Rows of a key, by its code, in offset order."""
        return self.order[self.starts[key] : self.ends[key]]

    def running_as_of(self, floor: Mapping[str, datetime]) -> pa.Array:
        """As-of time of each change: the running maximum of occurredAt over its key's versions.

        ``floor``: stored as-of times, for the keys where a change may have an earlier time.
        """
        times = self.occurred[self.order]
        falls = (times[1:] < times[:-1]) & (self.codes[1:] == self.codes[:-1])
        late = set(np.searchsorted(self.starts, np.flatnonzero(falls), side="right") - 1)
        floors: dict[int, int] = {}
        if floor:
            for code, moment in zip(self.codes_of(floor), floor.values(), strict=True):
                if code is not None:
                    floors[code] = _micros(moment)
            late |= set(floors)
        for key in late:
            part = slice(self.starts[key], self.ends[key])
            running = np.maximum.accumulate(times[part])
            times[part] = np.maximum(running, floors.get(int(key), running[0]))
        found = np.empty_like(times)
        found[self.order] = times
        return pa.array(found).cast(pa.timestamp("us", tz="UTC"))


@dataclass(frozen=True, slots=True)
class Released:
    """A change that was held in the store, and the row of the change that releases it."""

    key: str
    version: int
    row: pa.Table
    by: int


@dataclass(slots=True)
class Verdict:
    """The verdicts on a partition's changes; rows are indexes of the given changes."""

    apply: Bools
    ordinary: bool = True
    """Whether all changes apply in the given order, so that they need not be sorted."""
    released: list[Released] = field(default_factory=list)
    hold: list[int] = field(default_factory=list)
    waited: list[tuple[int, int]] = field(default_factory=list)
    """Changes held within this batch, each with the row of the change that released it."""
    dead: list[tuple[int, str]] = field(default_factory=list)
    duplicates: list[int] = field(default_factory=list)
    floors: dict[str, datetime] = field(default_factory=dict)


Ids = Callable[[Iterable[tuple[str, int]]], Mapping[tuple[str, int], str]]
"""Returns the ids of versions that were applied before, where the store still has them."""


def judge(
    keys: Keys,
    gates: Mapping[str, GateRow],
    held: Mapping[str, Mapping[int, HeldRow]],
    ids: Ids,
) -> Verdict:
    """Decide the verdict on each change.

    ``gates`` has a row for every key that is not dense, that has held changes, or whose first
    version does not follow the gate's; all changes of other keys apply. Cost: array operations for
    those, one step per change for the keys in ``gates``.
    """
    verdict = Verdict(apply=np.ones(keys.changes.num_rows, dtype=np.bool_))
    verdict.ordinary = not gates
    if verdict.ordinary:
        return verdict
    change_ids = keys.changes["id"]
    old: list[tuple[str, int, int, str]] = []
    for (name, gate), code in zip(gates.items(), keys.codes_of(gates), strict=True):
        assert code is not None, "each gate row belongs to a key of the batch"
        if gate.as_of is not None:
            verdict.floors[name] = gate.as_of
        rows = keys.rows_of(code).tolist()
        found = [change_ids[row].as_py().lower() for row in rows]
        waiting = dict(held.get(name, {}))
        old += _judge_key(keys, name, gate, rows, found, waiting, verdict)
    known = ids({(name, version) for name, version, _, _ in old}) if old else {}
    for name, version, row, change_id in old:
        if known.get((name, version), change_id) == change_id:
            verdict.duplicates.append(row)
        else:
            verdict.dead.append((row, CONFLICT))
    return verdict


def _judge_key(
    keys: Keys,
    name: str,
    gate: GateRow,
    rows: list[int],
    change_ids: list[str],
    waiting: dict[int, HeldRow],
    verdict: Verdict,
) -> list[tuple[str, int, int, str]]:
    """Judge one key's changes in order; returns those whose stored id must be looked up."""
    newest = gate.version
    seen: dict[int, str] = {}
    if gate.change_id is not None:
        seen[gate.version] = gate.change_id
    # Versions held from this batch: their rows are here, not in the store.
    here: dict[int, tuple[int, str]] = {}
    old: list[tuple[str, int, int, str]] = []
    for row, change_id in zip(rows, change_ids, strict=True):
        version = int(keys.versions[row])
        verdict.apply[row] = version == newest + 1
        if version == newest + 1:
            newest, seen[version] = version, change_id
            newest = _release(name, newest, row, waiting, here, seen, verdict)
        elif version <= newest:
            if version not in seen:
                old.append((name, version, row, change_id))
            elif seen[version] == change_id:
                verdict.duplicates.append(row)
            else:
                verdict.dead.append((row, CONFLICT))
        else:
            first = waiting[version].change_id if version in waiting else None
            first = here[version][1] if version in here else first
            if first is None:
                here[version] = (row, change_id)
            elif first == change_id:
                verdict.duplicates.append(row)
            else:
                verdict.dead.append((row, CONFLICT))
    verdict.hold += [row for row, _ in here.values()]
    return old


def _release(
    name: str,
    newest: int,
    by: int,
    waiting: dict[int, HeldRow],
    here: dict[int, tuple[int, str]],
    seen: dict[int, str],
    verdict: Verdict,
) -> int:
    """Release held changes whose gap is filled, in order; returns the newest version applied."""
    while True:
        version = newest + 1
        if version in here:
            row, change_id = here.pop(version)
            verdict.apply[row] = True
            verdict.waited.append((row, by))
        elif version in waiting:
            stored = waiting.pop(version)
            verdict.released.append(Released(name, version, stored.row, by))
            change_id = stored.change_id
        else:
            return newest
        newest, seen[version] = version, change_id


def _micros(moment: datetime) -> int:
    return pa.scalar(moment, pa.timestamp("us", tz="UTC")).cast(pa.int64()).as_py()  # type: ignore[no-any-return]
