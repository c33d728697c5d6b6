"""Which rows may go on: whole source transactions, or those that waited long enough. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

_DONE_MAX: Final = 10_000
Place = tuple[str, int]


@dataclass(slots=True)
class _Transaction:
    since_s: float
    count: int | None = None
    expected: int | None = None
    seen: set[int] = field(default_factory=set)
    rows: int = 0
    waiting: int = 0
    """Its rows that have not gone on."""
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

    A transaction is ready when its end was told and all rows of captured tables are there. One
    whose end does not come within ``wait_s`` is let go without its block.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._open: dict[str, _Transaction] = {}
        self._done: OrderedDict[str, int | None] = OrderedDict()
        self.overdue = 0
        """How many transactions were let go without their end."""

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
        self._open[name].waiting -= 1

    def end(
        self, name: str, count: int, expected: int | None, place: Place, offset: int, now_s: float
    ) -> None:
        """A transaction's end is there, read at an offset that is needed until it is done."""
        if expected == 0 and name not in self._open:
            return
        transaction = self._of(name, now_s)
        transaction.count, transaction.expected = count, expected
        transaction.told_at.append((place, offset))

    def note(
        self, name: str, fields: dict[str, str], place: Place, offset: int, now_s: float
    ) -> None:
        """Provenance of all rows of a transaction is there."""
        transaction = self._of(name, now_s)
        transaction.notes.update(fields)
        transaction.told_at.append((place, offset))

    def is_ready(self, name: str, now_s: float) -> bool:
        """Whether the rows of a transaction may go on."""
        transaction = self._open.get(name)
        if transaction is None:
            return name in self._done
        if transaction.is_whole:
            return True
        return now_s - transaction.since_s > self._wait_s

    def count(self, name: str) -> int | None:
        """How many rows a ready transaction has; ``None``: its end was never told."""
        transaction = self._open.get(name)
        if transaction is None:
            return self._done.get(name)
        return transaction.count if transaction.is_whole else None

    def notes(self, name: str) -> dict[str, str]:
        """Provenance told for a transaction."""
        transaction = self._open.get(name)
        return {} if transaction is None else transaction.notes

    def settle(self, now_s: float) -> None:
        """Forget transactions whose rows have all gone on, and ends whose rows never came."""
        for name, transaction in list(self._open.items()):
            if transaction.waiting:
                continue
            late = now_s - transaction.since_s > self._wait_s
            if not transaction.is_whole and not late:
                continue
            if not transaction.is_whole and (transaction.seen or transaction.rows):
                self.overdue += 1
            del self._open[name]
            self._done[name] = transaction.count if transaction.is_whole else None
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

    def _of(self, name: str, now_s: float) -> _Transaction:
        found = self._open.get(name)
        if found is None:
            found = self._open[name] = _Transaction(now_s)
            # Told again after a restart of the capture: what was known still holds.
            found.count = self._done.pop(name, None)
        return found
