"""The order of a capture's raw log: which rows are re-reads, where transactions end. Pure.

A connector that restarts writes rows once more whose source position it had not stored yet. Each
row has a place in the stream that the connector writes; a row whose place is not after the last
place is a re-read, and is dropped *before* the rows of a transaction are counted. The END record
of a transaction only closes it: its count is the number of its rows in the raw log, over all runs
of the connector (decision 25).
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from everstate.errors import RowsUnplaced, SourceReplaced, TableReplaced
from everstate.sources.cdc.columns import (
    ENDED,
    NOTE,
    NOWHERE,
    PREPARED,
    REFUSED,
    SOURCE,
    UNKNOWN,
    Block,
    Rows,
    decode_note,
    decode_refusal,
    decode_source,
)
from everstate.sources.cdc.completion import READ_BEFORE
from everstate.sources.cdc.reading import Fingerprint
from everstate.sources.cdc.shapes.debezium import ends, may_be_prepared
from everstate.sources.cdc.shapes.places import lacks_position

logger = logging.getLogger("everstate.sources.cdc")

SEEN: Final = Block("", fate=READ_BEFORE)
"""Block of a row that was read before."""
StreamRow = tuple[int, str | None, str | None]
"""Number of the table, op and key; see :func:`_keys`."""


class EndedSnapshot(NamedTuple):
    """A first snapshot that the connector took although rows had been read before it."""

    position: bytes
    first: int
    end: int
    """Offset after its last row in the raw log."""


class SnapshotRun(msgspec.Struct, omit_defaults=True):
    """A first snapshot whose rows are being read, up to the first row or END of the log."""

    position: bytes = b""
    """Position that all its rows share; ``b""``: none of them was read yet."""
    first: int = 0
    """Offset of its first row in the raw log."""
    is_again: bool = False
    """Whether rows were read before it, so that at its end known entities that it lacks must be
    deleted."""


class StreamStanding(msgspec.Struct, omit_defaults=True):
    """The state with which reading resumes at an offset of the raw log."""

    place: bytes = b""
    """Place of the last row."""
    group: list[StreamRow] = []
    """The rows that have this place: the rows of one COPY share a place."""
    time_us: int = 0
    """The newest time of any row."""
    open: Block | None = None
    """The transaction whose rows are published in several batches."""
    epoch: int = 1
    identity: str | None = None
    """Identity of the database that the rows come from."""
    snapshot: SnapshotRun | None = None
    mark: str | None = None
    """The newest mark in that database (``replaced``); ``None``: none is known."""
    tables: dict[str, Fingerprint | None] = {}
    seen: int = 0
    """When its tables were looked at last, and were ``tables`` (``SourceIdentity``)."""
    gone: dict[str, str] = {}
    """Table → why entities without a row stay in this epoch, and what deletes them."""
    may_delete: int = 0
    begun: str | None = None
    """GTID in the last BEGIN record, which rows of an outbox lack; "" while they are re-reads."""
    passed: dict[str, int] = {}
    """Domain of GTIDs → number of the last transaction whose rows are all read."""


class _Images(msgspec.Struct):
    """The images of a row in its record: only they are the same when it is written once more."""

    before: msgspec.Raw = msgspec.Raw(b"null")
    after: msgspec.Raw = msgspec.Raw(b"null")


_decode_images: Final = msgspec.json.Decoder(_Images).decode


def _keys(rows: Rows) -> list[str | None]:
    """The key of each row; of a refused row without one, a digest of what its record says of it.

    So rows of one COPY that are all refused, and whose keys cannot be read, are told apart.
    """
    if REFUSED not in rows.what:
        return rows.key
    columns = zip(rows.what, rows.key, rows.rest, strict=True)
    return [
        _digest(rest) if what == REFUSED and key is None and rest is not None else key
        for what, key, rest in columns
    ]


def _fate(transaction: str) -> str:
    """What becomes of a transaction that has no END record."""
    return PREPARED if may_be_prepared(transaction) else ""


def _digest(rest: bytes) -> str:
    _, key, value = decode_refusal(rest)
    try:
        images = _decode_images(value or b"")
        parts = [key or b"", bytes(images.before), bytes(images.after)]
    except msgspec.MsgspecError:
        parts = [key or b"", value or b""]
    return hashlib.sha256(msgspec.msgpack.encode(parts)).hexdigest()


class Stream:
    """Finds the rows of a raw log to publish: :meth:`scan` rows in order, :meth:`take` the ready.

    The rows of an open transaction are buffered in :attr:`rows`, and so are all rows after them.
    """

    def __init__(self, capture: str, standing: StreamStanding | None = None) -> None:
        self._capture = capture
        now = standing or StreamStanding()
        self._at = replace(now)
        """The standing after the last row, but for ``group`` and ``open``."""
        self._group: set[StreamRow] = set(now.group)
        self.rows = Rows.none()
        self.counted_to = 0
        """Offset up to which :meth:`counting` has counted a transaction that is too large to wait
        in memory for its end."""
        self._open: Block | None = None
        self._closed: Block | None = None
        """The first transaction that the last :meth:`scan` closed."""
        self.count = 0
        """Rows of the open transaction so far."""
        self._is_known = False
        """Whether its rows are released although its END record was not read."""
        self._begin = 0
        """Index in :attr:`rows` of the first row that waits."""
        self._kept: StreamStanding | None = None
        """The standing before the rows that wait; ``None``: no row waits."""
        self._replaced: SourceReplaced | None = None
        self.ended: EndedSnapshot | None = None
        """A snapshot that must be compared with the known entities before more rows are ready."""
        self._rest = Rows.none()
        """The rows that were read after it."""
        self._held_at: int | None = None
        """Offset of the raw log where rows of another database begin, or the rows after a
        snapshot that must be compared."""
        self.passed: Counter[int] = Counter()
        """Number of rows of a replaced database that are skipped, by number of their table."""
        self._passing: Counter[int] = Counter()
        """Rows that will be skipped if a new epoch follows."""
        if now.open is not None:
            self._open, self.count = replace(now.open, done=0), now.open.done
            self._is_known = True

    @property
    def ready(self) -> int:
        """How many of :attr:`rows` can be published."""
        return len(self.rows) if self._kept is None else self._begin

    @property
    def is_waiting(self) -> bool:
        """Whether a transaction waits for its end."""
        return self._kept is not None and self._held_at is None

    @property
    def waits(self) -> int:
        """Number of rows that wait."""
        return len(self.rows) - self.ready + len(self._rest)

    @property
    def notes(self) -> Mapping[str, str]:
        """Provenance of the open transaction so far."""
        return {} if self._open is None else self._open.notes

    @property
    def first_offset(self) -> int | None:
        """Offset in the raw log of the first row that waits; ``None``: none waits."""
        if self._kept is None:
            return None
        return self.rows.offset[self._begin] if self._held_at is None else self._held_at

    def standing(self) -> StreamStanding:
        """The standing before the rows that wait; the ready rows must have been taken."""
        return self._now() if self._kept is None else self._kept

    def take(self) -> Rows:
        """All rows that are ready."""
        count, self._begin = self.ready, 0
        return self.rows.split(count)

    def counting(self) -> Stream:
        """A stream that counts the rows of the open transaction, from its first row on."""
        assert self.first_offset is not None
        found = Stream(self._capture, self._kept)
        found.counted_to = self.first_offset
        return found

    def release(self, count: int | None, notes: Mapping[str, str], fate: str = "") -> Block:
        """Make the rows of the open transaction ready.

        ``count``: their number; ``None``: unknown. ``notes``: provenance that was read beyond the
        rows so far. ``fate``: see :class:`Block`. Out: the transaction before its first row.
        """
        block = self._open
        assert block is not None
        block.count, block.notes = count, {**block.notes, **notes}
        block.fate = _fate(block.id) if count is None else fate
        self._is_known, self._kept = True, None
        return replace(block)

    def raise_replaced(self) -> None:
        """Raise SourceReplaced when rows of another database or table wait for a new epoch."""
        if self._replaced is not None:
            raise self._replaced

    def compared(self, kept: Mapping[str, str]) -> None:
        """Record that the ended snapshot was compared; :meth:`resume` continues after it.

        ``kept``: table → why entities that it lacks were not deleted.
        """
        now = self._at.snapshot
        assert now is not None
        self._at.gone = {**self._at.gone, **kept}
        # Kept until rows of the source's log follow: one more first snapshot must be compared too.
        self._at.snapshot = SnapshotRun(now.position, now.first)
        self._kept = self._now()

    def resume(self) -> None:
        """Continue after a snapshot that was compared, once the outcome is published."""
        rows, self._rest = self._rest, Rows.none()
        self.ended = self._held_at = self._kept = None
        self.scan(rows)

    def scan(self, rows: Rows, *, keep: bool = True) -> Block | None:
        """Read the next rows; out: the first transaction that is closed in them.

        ``keep=False``: the rows are counted and not buffered.
        """
        self._closed = None
        while True:
            if self.ended is not None:
                self._rest.extend(rows)
                return self._closed
            if self._replaced is not None:
                rows = self._from_new_epoch(rows)
            rows = self._scan(rows, keep=keep)
            if not len(rows):
                return self._closed

    def _scan(self, rows: Rows, *, keep: bool) -> Rows:
        """Read rows until another database or a snapshot to compare stops it; out: the rest."""
        begin, place, group = len(self.rows), self._at.place, self._group
        blocks: list[Block | None] = []
        indexes: list[int | None] = []
        add, number = blocks.append, indexes.append
        columns = zip(
            *(rows.what, rows.place, rows.tx, rows.table, rows.op, _keys(rows), rows.time_us),
            strict=True,
        )
        for at, (what, here, tx, table, op, key, time_us) in enumerate(columns):
            if self._at.snapshot is not None and (here is not None or what == ENDED):
                self._at.place = place
                if self._must_compare(begin + at, rows.offset[at]):
                    break
                if here is not None:
                    self._at.snapshot = None
            if here is None and tx == "" and self._at.begun is not None:
                add(self._routed(self._at.begun, begin + at))
                number(self.count)
                continue
            if here is None:
                self._at.place = place
                self._take_fact(rows, at)
                if op == "r" and (position := rows.position[at]):
                    self._read_by_snapshot(position, rows.offset[at])
                place, group = self._at.place, self._group
                if what == UNKNOWN:
                    self._break(begin + at, rows.offset[at], key or "", TableReplaced)
                    break
                if what == SOURCE and self._is_other(rows.rest[at], begin + at, rows.offset[at]):
                    break
                add(self._open if what == NOTE else None)
                number(None)
                continue
            if here < place or (here == place and (table, op, key) in group):
                if self._is_new(place, here, time_us, begin + at, rows.offset[at]):
                    break
                add(SEEN)
                number(None)
                continue
            if self._open is None or tx != self._open.id:
                self._at.place = place
                self._enter(tx, begin + at)
            if here == place:
                group.add((table, op, key))
            else:
                place = here
                group = self._group = {(table, op, key)}
            self._at.time_us = max(self._at.time_us, time_us or 0)
            block = self._open
            if block is None or what == NOTE:
                if block is not None:
                    block.notes = {**block.notes, **decode_note(rows.rest[at] or b"").fields}
                number(None)
            else:
                self.count += 1
                number(self.count)
            add(block)
        self._at.place = place
        rest = Rows.none()
        if len(blocks) < len(rows):
            rest.extend(rows)
            rows = rest.split(len(blocks))
        if keep:
            rows.block, rows.index = blocks, indexes
            self.rows.extend(rows)
        return rest

    def _is_new(self, place: bytes, here: bytes, time_us: int | None, at: int, offset: int) -> bool:
        """Whether a row at a place that was read was never read itself: then reading stops here."""
        self._at.place = place
        if lacks_position(place, here):
            self._break(at, offset, "rows of its transactions have no positions", RowsUnplaced)
        elif time_us is not None and time_us > self._at.time_us:
            self._break(at, offset, f"its log begins again at offset {offset} of the raw log")
        return self._replaced is not None

    def _read_by_snapshot(self, position: bytes, offset: int) -> None:
        """Handle a row of a first snapshot, which a restarted connector may take once more.

        It does so as long as it has not stored a source position.
        """
        now = self._at.snapshot
        if now is not None and now.position == position:
            if position != NOWHERE or now.first == offset:
                return
        if self._at.place or (now is not None and now.position):
            logger.warning(
                "capture %s: its connector had stored no position and reads all rows again, from "
                "offset %d of the raw log on: of an entity that changed several times meanwhile "
                "only the last state is known",
                *(self._capture, offset),
            )
        is_again = bool(self._at.place) or now is not None
        self._at.snapshot = SnapshotRun(position, offset, is_again)
        # Places start over after the snapshot: its first transaction has no commit before it.
        self._at.place, self._group = b"", set()

    def _must_compare(self, at: int, offset: int) -> bool:
        """Called before rows of the source's log; out: whether to compare the snapshot first."""
        now = self._at.snapshot
        assert now is not None
        if now.is_again and now.position:
            self._kept, self._begin, self._held_at = self._now(), at, offset
            self.ended = EndedSnapshot(now.position, now.first, offset)
        return self.ended is not None

    def _routed(self, begun: str, at: int) -> Block | None:
        """The transaction of an outbox's row, of which the last BEGIN record says ``begun``."""
        if not begun:
            return SEEN
        self._enter(begun, at)
        self.count += 1
        return self._open

    def _take_fact(self, rows: Rows, at: int) -> None:
        """Close the open transaction where a record that is no row of the log ends it."""
        what, tx, block = rows.what[at], rows.tx[at], self._open
        # Rows of an incremental snapshot have no position, and may be within a transaction.
        is_closed = block is not None and bool(rows.position[at])
        if what == ENDED:
            is_closed = block is not None and ends(tx, block.id)
        elif what == SOURCE:
            is_closed = self._begins(rows.rest[at])
        if is_closed:
            self._close(is_whole=what == ENDED, by=tx)
        if what == ENDED and tx is not None:
            self._pass(tx)

    def _enter(self, tx: str | None, at: int) -> None:
        """Begin the transaction of the row at ``at``, unless it is open, and close another one."""
        if self._open is not None:
            if tx == self._open.id:
                return
            self._close()
        if tx is not None:
            self._kept, self._begin = self._now(), at
            self._open, self.count, self._is_known = Block(tx), 0, False

    def _pass(self, tx: str) -> None:
        """Record which transactions of MariaDB are read whole, at a BEGIN or END record.

        A connector that restarted writes earlier ones once more.
        """
        begun = tx[1:] if tx[0] == "<" else None
        if begun is not None:
            domain, _, number = begun.split("-")
            if int(number) <= self._at.passed.get(domain, -1):
                self._at.begun = ""
                return
        # The binlog has its transactions one after the other, those of all domains.
        ended = tx if begun is None else self._at.begun
        self._at.begun = begun
        if ended and ended != begun and may_be_prepared(ended):
            domain, _, number = ended.split("-")
            last = max(int(number), self._at.passed.get(domain, 0))
            self._at.passed = {**self._at.passed, domain: last}

    def _close(self, *, is_whole: bool = True, by: str | None = None) -> None:
        """Close the open transaction; ``is_whole=False``: not all of its rows were read here.

        ``by``: what an END record, or a BEGIN, says.
        """
        block, self._open = self._open, None
        assert block is not None
        if not self._is_known:
            block.count = self.count if is_whole else None
            block.fate = "" if by == block.id else _fate(block.id)
        elif block.count not in (None, self.count):
            logger.error(
                "capture %s: transaction %s was counted %d rows, and has %d",
                *(self._capture, block.id, block.count, self.count),
            )
        self._kept, self.count, self._is_known = None, 0, False
        self._closed = self._closed or block

    def _now(self) -> StreamStanding:
        block, one = self._open, None
        if block is not None and self._is_known:
            one = replace(block, done=self.count)
        return replace(self._at, group=list(self._group), open=one)

    def _begins(self, rest: bytes | None) -> bool:
        """Take over what is said of the next rows; out: whether the open transaction ends."""
        source, now = decode_source(rest or b""), self._at
        if source.epoch > now.epoch:
            self._at = StreamStanding(
                epoch=source.epoch,
                identity=source.identity,
                snapshot=SnapshotRun(is_again=True),
                mark=source.mark,
                tables=source.tables,
                seen=source.seen,
                may_delete=source.may_delete,
            )
            self._group = set()
            return self._open is not None
        if source.epoch == now.epoch and now.identity in (None, source.identity):
            now.identity, now.mark = source.identity, source.mark or now.mark
        if source.epoch in (0, now.epoch):
            tables = dict(now.tables)
            for table, one in source.tables.items():
                before = tables.get(table)
                # Of a table that was truncated, other files say nothing, and other columns do.
                tables[table] = one or (before and replace(before, parts={}))
            now.tables = tables
            now.seen, now.gone = source.seen or now.seen, {**now.gone, **source.gone}
        return False

    def _is_other(self, rest: bytes | None, at: int, offset: int) -> bool:
        """Stop here if the next rows are of another database without a new epoch."""
        source, known = decode_source(rest or b""), self._at.identity
        is_other = source.epoch == self._at.epoch and known not in (None, source.identity)
        if is_other:
            reason = f"it is {source.identity}, and the rows before are of {known}"
            self._break(at, offset, reason)
        return is_other

    def _break(
        self, at: int, offset: int, reason: str, kind: type[SourceReplaced] = SourceReplaced
    ) -> None:
        """Stop here, where rows begin whose order after the earlier ones is unknown."""
        if self._open is not None:
            self._close(is_whole=False)
        self._kept, self._begin, self._held_at = self._now(), at, offset
        self._replaced = kind(self._capture, reason)

    def _from_new_epoch(self, rows: Rows) -> Rows:
        """Skip rows up to a new epoch: its snapshot contains the effect of the skipped rows."""
        for at, what in enumerate(rows.what):
            if what == SOURCE and decode_source(rows.rest[at] or b"").epoch > self._at.epoch:
                self._pass_over(rows.split(at))
                # Only now the position moves behind them: without a new epoch they are read again.
                self.passed.update(self._passing)
                self._passing.clear()
                self._replaced = self._held_at = self._kept = None
                return rows
        self._pass_over(rows.split(len(rows)))
        return rows

    def _pass_over(self, rows: Rows) -> None:
        self._passing.update(table for table in rows.table if table >= 0)
