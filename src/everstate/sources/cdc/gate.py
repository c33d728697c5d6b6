"""Which rows may go on: whole source transactions, or those that waited long enough. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

import msgspec

_DONE_MAX: Final = 10_000
Place = tuple[str, int]
"""Topic and partition."""


class Told(msgspec.Struct, array_like=True, frozen=True):
    """What a source told of one of its transactions."""

    count: int | None
    """Its rows in all tables; ``None``: its end was never told."""
    notes: Mapping[str, str] = {}
    """Provenance of all its rows."""

    @property
    def size(self) -> int:
        """About how many bytes it takes as JSON."""
        return 16 + sum(len(name) + 4 * len(value) + 6 for name, value in self.notes.items())


class ReadUntil(NamedTuple):
    """Moments (seconds) up to which all that the capture wrote of these has been read."""

    rows_s: float = -inf
    ends_s: float = -inf
    notes_s: float = inf
    """Infinite where no provenance is told beside the rows."""


@dataclass(slots=True)
class _Transaction:
    since_s: float
    count: int | None = None
    expected: int | None = None
    ended_s: float = -inf
    """When its end was read."""
    seen: set[int] = field(default_factory=set)
    rows: int = 0
    waiting: int = 0
    """Its rows that have not gone on."""
    is_begun: bool = False
    """Whether a row of it has gone on."""
    notes: dict[str, str] = field(default_factory=dict)
    told_at: list[tuple[Place, int]] = field(default_factory=list)
    """Records of the transaction and message topics that are needed until it is done."""

    @property
    def is_whole(self) -> bool:
        if self.count is None:
            return False
        return self.expected is None or max(len(self.seen), self.rows) >= self.expected


class TransactionGate:
    """Collects the parts of source transactions as they come, in any order.

    A transaction is ready when its end was told, all rows of captured tables are there, and so is
    the provenance that was told before its end. One of which a part is missing is let go after
    ``wait_s``; that time runs by what was read, for what waits to be read is not missing.
    """

    def __init__(self, wait_s: float, begun: Mapping[str, Told] | None = None) -> None:
        """``begun``: transactions of which some rows had gone on when :meth:`begun` was asked."""
        self._wait_s = wait_s
        self._open: dict[str, _Transaction] = {}
        self._done: OrderedDict[str, Told] = OrderedDict()
        self._before = dict(begun or {})
        """Begun before a restart; of use until what was written by then has been read again."""
        self.overdue = 0
        """How many transactions were let go without a part of them."""

    def row(self, name: str, index: int | None, now_s: float) -> None:
        """A row of a transaction is there."""
        transaction = self._of(name, now_s)
        transaction.waiting += 1
        if index is None:
            transaction.rows += 1
        else:
            transaction.seen.add(index)

    def gone(self, name: str) -> None:
        """A row of a transaction has gone on."""
        transaction = self._open[name]
        transaction.waiting -= 1
        transaction.is_begun = True

    def end(
        self, name: str, count: int, expected: int | None, place: Place, offset: int, now_s: float
    ) -> None:
        """A transaction's end is there, read at an offset that is needed until it is done."""
        if expected == 0 and name not in self._open:
            return
        transaction = self._of(name, now_s)
        transaction.told_at.append((place, offset))
        # Told again after a restart, it does not wait for rows that went on before.
        if transaction.count is None:
            transaction.count, transaction.expected = count, expected
            transaction.ended_s = now_s

    def note(
        self, name: str, fields: dict[str, str], place: Place, offset: int, now_s: float
    ) -> None:
        """Provenance of all rows of a transaction is there."""
        transaction = self._of(name, now_s)
        transaction.notes.update(fields)
        transaction.told_at.append((place, offset))

    def is_ready(self, name: str, read: ReadUntil) -> bool:
        """Whether the rows of a transaction may go on."""
        transaction = self._open.get(name)
        if transaction is None:
            return name in self._done
        if transaction.is_whole:
            return read.notes_s >= transaction.ended_s
        return self._is_late(transaction, read)

    def count(self, name: str) -> int | None:
        """How many rows a transaction has; ``None``: its end was never told."""
        found = self._open.get(name) or self._done.get(name)
        return None if found is None else found.count

    def notes(self, name: str) -> Mapping[str, str]:
        """Provenance told for a transaction."""
        found = self._open.get(name) or self._done.get(name)
        return {} if found is None else found.notes

    def begun(self, bytes_max: int) -> dict[str, Told]:
        """Transactions of which some rows have gone on and others not: the oldest, in JSON."""
        found = dict(self._before)
        bytes_max -= sum(len(name) + told.size for name, told in found.items())
        for name, transaction in self._open.items():
            if transaction.is_begun and transaction.waiting and transaction.count is not None:
                told = Told(transaction.count, transaction.notes)
                bytes_max -= len(name) + told.size
                if bytes_max < 0:
                    break
                found[name] = told
        return found

    def ends_ahead(self, enough: int) -> bool:
        """Whether as many ends are there whose rows are not."""
        if len(self._open) < enough:
            return False
        waited_for = (one for one in self._open.values() if one.told_at and not one.waiting)
        return sum(1 for _ in waited_for) >= enough

    def settle(self, read: ReadUntil) -> None:
        """Forget transactions whose rows have all gone on, and ends whose rows never came."""
        if read.rows_s > -inf:
            self._before = {}
        for name, transaction in list(self._open.items()):
            if transaction.waiting:
                continue
            if not transaction.is_whole:
                if not self._is_late(transaction, read):
                    continue
                self.overdue += transaction.is_begun
            del self._open[name]
            self._done[name] = Told(transaction.count, transaction.notes)
            while len(self._done) > _DONE_MAX:
                self._done.popitem(last=False)

    def needed_from(self, place: Place) -> int | None:
        """First offset of a topic that is still needed; ``None``: none is."""
        offsets = [
            offset
            for transaction in self._open.values()
            for where, offset in transaction.told_at
            if where == place
        ]
        return min(offsets, default=None)

    def _is_late(self, transaction: _Transaction, read: ReadUntil) -> bool:
        """Whether what is missing of it was not written for so long."""
        until_s = read.ends_s if transaction.count is None else read.rows_s
        return until_s - transaction.since_s > self._wait_s

    def _of(self, name: str, now_s: float) -> _Transaction:
        found = self._open.get(name)
        if found is None:
            found = self._open[name] = _Transaction(now_s)
            # Read again after a restart, of the capture or of ours: what was known still holds.
            found.is_begun = name in self._before
            told = self._done.pop(name, None) or self._before.get(name)
            if told is not None:
                found.count, found.notes = told.count, dict(told.notes)
        return found
