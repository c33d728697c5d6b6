"""The core of an entity type: it judges every record of a partition's range, once.

`latest` is the version gate. Rows, position, counters and every exception from "applied" commit
together (law 4). The transaction begins with the compare-and-swap of the position; an attempt that
loses it changes nothing (C11). The position comes from the range, never from rows (C12). Views
whose position is the start of the range ride: they are written in the same transaction. A rider
that fails stays behind, without stopping the others (C13).

This module does not depend on a database: a store implements :class:`CoreTransaction`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from everstate.errors import HeldOverflow, PositionMoved, Unavailable, ViewStoreError
from everstate.log.positions import Range
from everstate.views.batch import Batch
from everstate.views.gate import NO_VERSION, Bools, GateRow, HeldRow, Ints, Keys, Verdict, judge
from everstate.views.misfits import MisfitCount
from everstate.views.tables import Core, KeptTable, lacking, planned_columns

RETRIES_MAX: Final = 5
REFUSED: Final = "refused_by_store"


@dataclass(frozen=True, slots=True)
class Failure:
    """A rider that could not be written; its position stays at the start of the range."""

    view: str
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Applied:
    """Verdicts on a range's records in the core, or in one trailing view, as counts.

    ``applied`` also counts held changes that were released, and ``dead`` held changes that the
    tables refused; ``released`` is the number of both. So applied - released + duplicate + held +
    dead records were read past the position.
    """

    applied: int = 0
    duplicate: int = 0
    held: int = 0
    dead: int = 0
    released: int = 0
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """A held change, and the offset of the change that released it; ``None``: it is still held."""

    change: pa.Table
    released_at: int | None


class Refused(Exception):
    """`latest` refuses a change, so that it is dead for every view (C19)."""

    def __init__(self, offset: int, reason: str) -> None:
        self.offset, self.reason = offset, reason
        super().__init__(reason)


class Full(Exception):
    """No more changes may be held; the records before ``offset`` still fit."""

    def __init__(self, offset: int, overflow: HeldOverflow) -> None:
        self.offset, self.overflow = offset, overflow
        super().__init__(str(overflow))


class Again(Exception):
    """The transaction conflicted with another one and was rolled back; it may be retried."""


class CoreTransaction(Protocol):
    """One transaction of a core over one partition; leaving it without `commit` rolls it back."""

    def take(self, start: int, end: int) -> bool:
        """Move the core's position from start to end; returns whether it was at start."""

    def held_keys(self) -> set[str]:
        """Keys of this partition with held changes."""

    def held(self, keys: Iterable[str]) -> dict[str, dict[int, HeldRow]]:
        """Held changes of some keys, by key and version."""

    def held_at(self, offsets: Iterable[int]) -> list[tuple[tuple[str, int], pa.Table]]:
        """Held changes whose records are at some offsets: key and version, planned change."""

    def gates(self, keys: Keys, first: Ints) -> dict[str, GateRow]:
        """Gate rows of keys whose ``first`` version does not follow the stored one.

        And of keys with a change that is older than the stored as-of time.
        """

    def ids(self, versions: Iterable[tuple[str, int]]) -> Mapping[tuple[str, int], str]:
        """Ids of applied versions, as far as the history has them."""

    def unstorable(self, changes: pa.Table) -> dict[int, str]:
        """Reasons, by offset, of readable changes that no table can store.

        It tests every change, also one for which no row is written, so that whether a record is
        dead does not depend on how the log is cut into ranges (C19).
        """

    def write_latest(self, batch: Batch) -> None:
        """Put the newest change of each key into `latest`; raises Refused, ViewStoreError."""

    def write_next(self, batch: Batch) -> Mapping[str, datetime] | None:
        """Write `latest` only if the first change of every key follows the stored version.

        Returns the stored as-of times of keys with an older change, as far as a rider needs them.
        ``None``: some key's first change does not follow, or a row is refused; the transaction
        cannot be used any more then.
        """

    def ride(
        self, riders: Sequence[KeptTable], start: int, end: int, batch: Batch
    ) -> list[Failure]:
        """Move the riders whose position is ``start`` and write them; failed ones stay there."""

    def hold(self, held: Sequence[Held]) -> None:
        """Store changes that are held, or were held within this range; raises HeldOverflow."""

    def release(self, released: Sequence[tuple[str, int, int]]) -> None:
        """Mark held changes as released: key, version, offset of the change that released it.

        Their bytes stay, because trailing views need them.
        """

    def forget(self, versions: Sequence[tuple[str, int]]) -> None:
        """Delete held changes that are dead."""

    def dead_letter(self, changes: pa.Table, reasons: Sequence[tuple[int, str]]) -> None:
        """Store dead records: unreadable or not applicable; each place in the log once (law 7)."""

    def note_duplicates(self, runs: Sequence[tuple[int, int]]) -> None:
        """Store runs of duplicates: first and last offset, both inclusive."""

    def note_misfits(self, found: Sequence[MisfitCount]) -> None:
        """Add to the counts of values that do not fit the model."""

    def count(self, applied: Applied) -> None:
        """Add to the counters of the partition (law 7)."""

    def commit(self, end: int) -> None:
        """Commit; when the server's answer is lost, the position shows whether it committed."""


class CoreStore(Protocol):
    """The store of a core; one for each thread."""

    def transaction(self, core: Core, partition: int) -> AbstractContextManager[CoreTransaction]:
        """Begin a transaction; raises Again and Unavailable, also from inside the block."""

    def position(self, core: Core, partition: int) -> int | None:
        """The core's position; ``None``: there is none with this plan's fingerprint."""


def apply_range(
    store: CoreStore, core: Core, partition: int, given: Range, changes: pa.Table
) -> Applied:
    """Judge one partition's range and write the changes that apply, in one commit.

    ``changes`` has every record that was served in ``given``, with the planned columns of the
    riders. Records below the position are skipped, and a range that was judged before changes
    nothing. Raises PositionMoved when the core is behind the range, ViewStoreError, and Unavailable
    when the store cannot be reached; nothing is changed then. Raises HeldOverflow when more changes
    would be held than ``core.held_max``: the core has then judged the records before the first
    change that does not fit, so that the gaps can be seen.
    """
    offsets = changes["offset"].to_numpy()
    if np.any(offsets[1:] <= offsets[:-1]):
        changes = changes.sort_by("offset")
    start, end, poison, retries = given.start, given.end, dict[int, str](), 0
    overflow: HeldOverflow | None = None
    while True:
        try:
            with store.transaction(core, partition) as opened:
                if taken := opened.take(start, end):
                    applied = _Judging(opened, core, start, end).run(changes, poison)
                    opened.commit(end)
            if taken and overflow is not None:
                raise overflow
            if taken:
                return applied
        except Full as full:
            if full.offset <= start:
                raise full.overflow from None
            end, overflow = full.offset, full.overflow
            continue
        except Refused as refusal:
            if refusal.offset in poison:
                raise ViewStoreError(
                    f"{core.view}: the record at offset {refusal.offset:,} was marked as dead, and "
                    f"the database still rejects its batch: {refusal.reason}"
                ) from refusal
            poison[refusal.offset] = f"{REFUSED}: {refusal.reason}"
            continue
        except Again as cause:
            retries += 1
            if retries > RETRIES_MAX:
                raise Unavailable(
                    f"{core.view}: {retries} attempts to write partition {partition} conflicted "
                    f"with other transactions ({cause})"
                ) from cause
            continue
        position = store.position(core, partition)
        if position is None or position < given.start:
            at = "does not exist in this version" if position is None else f"is {position:,}"
            raise PositionMoved(
                f"{core.view}: the position in partition {partition} {at}, and the range begins at "
                f"{given.start:,}.",
                advice="Read the positions again.",
            )
        if position >= given.end:
            return Applied()
        start = position


class _Judging:
    """The work inside one transaction of a core."""

    def __init__(self, opened: CoreTransaction, core: Core, start: int, end: int) -> None:
        self._opened, self._core, self._start, self._end = opened, core, start, end

    def run(self, changes: pa.Table, poison: Mapping[int, str]) -> Applied:
        """Judge the changes, write those that apply, and store every exception."""
        opened = self._opened
        offsets = changes["offset"].to_numpy()
        mine = where(changes, (offsets >= self._start) & (offsets < self._end))
        alive = mine
        if mine["reason"].null_count < mine.num_rows:
            alive = mine.filter(pc.is_null(mine["reason"]))
        unstorable = opened.unstorable(alive)
        poison = {**poison, **{o: f"{REFUSED}: {reason}" for o, reason in unstorable.items()}}
        dead = _unreadable(mine, poison)
        if poison:
            killed = pc.is_in(alive["offset"], pa.array(list(poison), pa.int64()))
            alive = alive.filter(pc.invert(killed))
        refused = self._dead_letter_refused(poison)
        keys = Keys(alive)
        verdict = self._judge(keys)
        released = [found.row for found in verdict.released]
        riders = _riding(self._core.riders, released)
        going = _going(alive, verdict, released, riders)
        batch = Batch(going, verdict.floors, keys if going is alive else None)
        if batch.changes.num_rows:
            opened.write_latest(batch)
        failures = opened.ride(riders, self._start, self._end, batch)
        self._note(alive, verdict)
        if misfits := counted_misfits(batch.changes):
            opened.note_misfits(misfits)
        opened.dead_letter(mine, dead)
        opened.dead_letter(alive, verdict.dead)
        applied = Applied(
            applied=batch.changes.num_rows,
            duplicate=len(verdict.duplicates),
            held=len(verdict.hold),
            dead=len(dead) + len(verdict.dead) + refused,
            released=len(released) + refused,
            failures=tuple(failures),
        )
        opened.count(applied)
        return applied

    def _judge(self, keys: Keys) -> Verdict:
        """Compare with the gate; reads gate rows only of keys whose versions do not just follow."""
        opened = self._opened
        if not len(keys):
            return judge(keys, {}, {}, opened.ids)
        waiting = opened.held_keys()
        first = keys.versions[keys.firsts].copy()
        first[~keys.dense()] = NO_VERSION
        for code in keys.codes_of(waiting):
            if code is not None:
                first[code] = NO_VERSION
        gates = opened.gates(keys, first)
        mine = waiting & gates.keys()
        return judge(keys, gates, opened.held(mine) if mine else {}, opened.ids)

    def _note(self, alive: pa.Table, verdict: Verdict) -> None:
        """Store held, released and duplicate changes."""
        if verdict.ordinary:
            return
        offsets = alive["offset"]
        held = [Held(alive.slice(row, 1), None) for row in verdict.hold]
        held += [Held(alive.slice(row, 1), offsets[by].as_py()) for row, by in verdict.waited]
        self._opened.release(
            [(found.key, found.version, offsets[found.by].as_py()) for found in verdict.released]
        )
        try:
            self._opened.hold(held)
        except HeldOverflow as overflow:
            waiting = sorted(offsets[row].as_py() for row in verdict.hold)
            fits = max(0, len(waiting) - (overflow.held - overflow.limit))
            raise Full(waiting[fits] if waiting else self._start, overflow) from overflow
        self._opened.note_duplicates(runs(offsets.to_numpy(), verdict.duplicates))

    def _dead_letter_refused(self, poison: Mapping[int, str]) -> int:
        """Store held changes that `latest` refuses as dead; later versions of a key stay held."""
        waiting = self._opened.held_at(poison) if poison else []
        for version, change in waiting:
            self._opened.forget([version])
            self._opened.dead_letter(change, [(0, poison[change["offset"][0].as_py()])])
        return len(waiting)


def counted_misfits(changes: pa.Table) -> list[MisfitCount]:
    """Misfits among the changes of one partition; none where nobody looked for them."""
    if "misfits" not in changes.column_names:
        return []
    changes = changes.filter(pc.is_valid(changes["misfits"]))
    found: dict[tuple[str, int], list[int]] = {}
    columns = (changes[name].to_pylist() for name in ("misfits", "schema_version", "offset"))
    for fields, version, offset in zip(*columns, strict=True):
        for field in fields:
            found.setdefault((field, version), []).append(offset)
    return [(*what, len(places), min(places), max(places)) for what, places in found.items()]


def runs(offsets: Ints, rows: Sequence[int]) -> list[tuple[int, int]]:
    """Adjacent rows as runs: first and last offset of each."""
    found: list[tuple[int, int]] = []
    last = -2
    for row in sorted(rows):
        offset = int(offsets[row])
        if row == last + 1:
            found[-1] = (found[-1][0], offset)
        else:
            found.append((offset, offset))
        last = row
    return found


def _riding(riders: Sequence[KeptTable], released: Sequence[pa.Table]) -> list[KeptTable]:
    """Riders whose columns every released change has; the other riders trail this range (V2)."""
    absent = {table.name for change in released for table in lacking(riders, change.column_names)}
    return [table for table in riders if table.name not in absent]


def _unreadable(changes: pa.Table, poison: Mapping[int, str]) -> list[tuple[int, str]]:
    """Rows that are dead before the gate judges them, with their reasons."""
    found = list[tuple[int, str]]()
    if changes["reason"].null_count < changes.num_rows:
        rows = pc.indices_nonzero(pc.is_valid(changes["reason"])).to_pylist()
        found = [(row, changes["reason"][row].as_py()) for row in rows]
    if poison:
        offsets = changes["offset"].to_pylist()
        found += [(row, poison[o]) for row, o in enumerate(offsets) if o in poison]
    return found


def _going(
    changes: pa.Table, verdict: Verdict, released: Sequence[pa.Table], riders: Sequence[KeptTable]
) -> pa.Table:
    """Changes that apply, versions of a key in order.

    A released change may come before the change that released it, or from the store.
    """
    if verdict.ordinary:
        return changes
    going = changes.filter(pa.array(verdict.apply))
    if released:
        planned = {column for table in riders for column in planned_columns(table)}
        names = [name for name in changes.column_names if "__" not in name or name in planned]
        # A change that was held by an earlier release may lack a column of today.
        # No cast: an image that a change lacks (a null struct) has nulls in columns that are not
        # nullable, and Arrow refuses to cast those.
        parts = [going.select(names)]
        parts += [row.select([n for n in names if n in row.column_names]) for row in released]
        going = pa.concat_tables(parts, promote_options="permissive")
    return by_version(going)


def by_version(changes: pa.Table) -> pa.Table:
    """Changes with the versions of each key in order."""
    versions = changes["version"].to_numpy()
    if np.all(versions[1:] >= versions[:-1]):
        return changes
    return changes.take(pa.array(np.argsort(versions, kind="stable")))


def where(changes: pa.Table, wanted: Bools) -> pa.Table:
    """The changes for which a condition holds; nothing is copied when it holds for all."""
    return changes if wanted.all() else changes.filter(pa.array(wanted))
