"""The relay: moves committed changes from the outbox to the log, each once and in order."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final, Self

import psycopg
from prometheus_client import Counter, Gauge

from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import EverstateError, RecordRefused, Unavailable
from everstate.log.collector import collector_paused
from everstate.log.publisher import OncePublisher, Progress
from everstate.parts import waits, works
from everstate.sources.outbox import marks, parked
from everstate.sources.outbox.bound import check_log
from everstate.sources.outbox.compose import (
    Composer,
    OutboxRow,
    Unsendable,
    digest_of,
    read_rows,
)
from everstate.sources.outbox.database import Connection, connect, translated
from everstate.sources.outbox.marks import Note
from everstate.sources.outbox.pending import (
    Transaction,
    first_of,
    prefix,
    read_page,
    runs,
    sendable,
)
from everstate.sources.outbox.schema import install

LOGGER = logging.getLogger("everstate.sources.outbox")

OLDEST = Gauge(
    "everstate_outbox_oldest_unpublished_seconds", "Age of the oldest change not in the log"
)
BLOCKED = Gauge("everstate_outbox_blocked_transactions", "Transactions the log does not take")
PUBLISHED = Counter("everstate_outbox_published_changes", "Changes moved to the log")

_BATCH_BYTES_MAX: Final = 32 * 1_048_576
WHOLE_BYTES_MAX: Final = 128 * 1_048_576
"""A source transaction of more bytes is sent in parts, whatever its rows."""
_IN_ALL: Final = "SELECT count(*) FROM everstate_store.outbox_pending WHERE xid = %s::xid8"
_PAUSE_S: Final = 0.2
_PAUSE_S_MAX: Final = 5.0
_PUBLISH_S: Final = 30.0
_OPEN_S: Final = 10.0
_REPORT_EVERY_S: Final = 1.0
_TRIM_EVERY_S: Final = 30.0
_ALARM_S: Final = 30.0
_RETRY_PAUSE: Final = 3.0
"""A try that fails is followed by this many times its duration without one."""


class Relay:
    """Moves the outbox of one store to `.changes` and `.state`.

    A batch is whole source transactions, in an order that keeps the versions of each key; its
    records and its number go out in one Kafka transaction (C2), then its rows are taken off the
    outbox. A source transaction that is too large for one Kafka transaction goes out in several
    batches; its block says which of how many each change is. A relay that was killed in between
    asks the log which batch came last, and takes that one off instead of sending it again (C3). A
    transaction that the log refuses stays, with the later changes of its keys, and is tried again
    after ``retry_blocked_s`` and ever less often; all else goes on. How many stay does not matter:
    they are parked in a table of their own.

    One thread at a time; a second relay on the same store and prefix fences the first.
    """

    def __init__(
        self,
        config: Config,
        entity_types: Iterable[EntityType],
        *,
        retry_blocked_s: float = 30.0,
    ) -> None:
        self.name = "main"
        self._config = config
        self._retry_s = retry_blocked_s
        self._entity_types = tuple(entity_types)
        self._composer = Composer(config, self._entity_types)
        self._publisher = OncePublisher(config, f"relay-{self.name}")
        self._database: Connection | None = None
        self._is_open = False
        self._store_id = ""
        self._batch = 0
        self._read_to = ("", 0)
        """System and position up to which the log has the WAL; kept in each batch's note."""
        self._page_rows = config.store.relay_batch_rows
        self._parts: dict[str, tuple[int, int]] = {}
        """Of transactions that are sent in parts: changes in the log, and changes in all."""
        self._any_blocked = False
        self._retry_due = 0.0
        """When a blocked transaction may be tried again (monotonic)."""
        self._alarmed = False
        self._most: list[int] = []
        """How many transactions the next batches may have, while a refused one is looked for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up the connections; what is unpublished stays unpublished."""
        self._is_open = False
        self._publisher.close()
        if self._database is not None:
            with suppress(psycopg.Error):
                self._database.close()
            self._database = None

    def run(self, stop: threading.Event) -> None:
        """Move changes until ``stop`` is set, at least once; waits while a server is away.

        Raises Fenced when another relay took over, and LogError for what waiting does not mend.
        """
        ended = threading.Event()
        trimmer = threading.Thread(
            target=self._keep_trimmed, args=(ended,), name=f"trim-{self.name}", daemon=True
        )
        trimmer.start()
        try:
            self._keep_moving(stop)
        finally:
            ended.set()
            trimmer.join()

    def _keep_moving(self, stop: threading.Event) -> None:
        pause_s, next_report = _PAUSE_S, 0.0
        while True:
            try:
                moved = self.step()
                works()
                now = time.monotonic()
                if now >= next_report:
                    self._report()
                    next_report = now + _REPORT_EVERY_S
                wait_s = 0.0 if moved else self._idle_s
                pause_s = _PAUSE_S
            except Unavailable as error:
                LOGGER.warning("relay waits %.1f s: %s", pause_s, error.message)
                waits(error, pause_s)
                wait_s, pause_s = pause_s, min(_PAUSE_S_MAX, pause_s * 2)
            if stop.wait(wait_s):
                return

    def step(self) -> int:
        """Move one batch; says how many changes, 0 when there is nothing to move.

        Raises Unavailable when a server is away: nothing is lost, call again.
        """
        doing = f"relay {self.name}"
        try:
            with collector_paused(), translated(self._config.store_dsn, doing):
                return self._advance(self._opened())
        except Unavailable:
            self.close()
            raise

    @property
    def _idle_s(self) -> float:
        """Seconds between two steps while there is nothing to move."""
        return self._config.store.relay_poll_ms / 1000

    def _advance(self, database: Connection) -> int:
        """Move one batch of what is pending in the outbox."""
        moved = self._retry_blocked(database)
        while True:
            page = read_page(database, self._page_rows)
            waiting = parked.park_waiting(database, page)
            transactions = sendable(page, waiting)
            if not transactions:
                if not page.is_full:
                    return moved
                if waiting:
                    continue
                first = first_of(page)
                if self._page_rows < self._whole_rows and first.xid not in self._parts:
                    self._page_rows = min(self._whole_rows, 2 * self._page_rows)
                    continue
                transactions = [self._part(database, first)]
            self._page_rows = self._config.store.relay_batch_rows
            count = prefix(transactions, self._page_rows, _BATCH_BYTES_MAX)
            if self._most:
                count = min(count, self._most.pop())
            if self._is_large(transactions[0]):
                transactions[0], count = self._part(database, transactions[0]), 1
            moved += self._move(database, transactions[:count])
            if moved:
                return moved

    @property
    def _whole_rows(self) -> int:
        settings = self._config.store
        return max(settings.relay_batch_rows, settings.relay_transaction_rows)

    def _is_large(self, transaction: Transaction) -> bool:
        """Whether no Kafka transaction may have all of it."""
        return len(transaction.rows) > self._whole_rows or transaction.bytes > WHOLE_BYTES_MAX

    def _part(self, database: Connection, transaction: Transaction) -> Transaction:
        """The first changes of a transaction, as many as a batch takes."""
        if transaction.xid not in self._parts:
            found = database.execute(_IN_ALL, [transaction.xid]).fetchone()
            self._parts[transaction.xid] = (0, found[0] if found is not None else 0)
        return transaction.part(self._config.store.relay_batch_rows, _BATCH_BYTES_MAX)

    def trim(self) -> int:
        """Delete rows published more than ``store.outbox_keep_hours`` ago; says how many.

        On a connection of its own: publishing does not wait for it. Raises Unavailable.
        """
        dsn, doing = self._config.store_dsn, "trimming the outbox"
        with translated(dsn, doing), connect(dsn, f"everstate-trim-{self.name}") as database:
            return marks.trim(database, self._config.store.outbox_keep_hours * 3600)

    def _keep_trimmed(self, ended: threading.Event) -> None:
        """Trim every now and then; what fails is told, and tried again."""
        while not ended.wait(_TRIM_EVERY_S):
            try:
                self.trim()
            except EverstateError as error:
                LOGGER.warning("the outbox is not trimmed: %s", error.message)

    def refill(self, since: datetime) -> int:
        """Publish again what was published since then and is still kept; says how many changes.

        For a log that lost its tail (C3). Ids and versions are the same, so what the log still
        has is a duplicate, and changes no view.
        """
        with translated(self._config.store_dsn, "refilling the log"):
            return marks.refill(self._connected(), since)

    def _connected(self) -> Connection:
        if self._database is None:
            self._database = connect(self._config.store_dsn, f"everstate-relay-{self.name}")
        return self._database

    def _opened(self) -> Connection:
        database = self._connected()
        if not self._is_open:
            install(database, ())
            check_log(database, self._config, [each.name for each in self._entity_types])
            progress = self._publisher.open(_OPEN_S)
            store_id, batch = marks.newest_batch(database, self.name)
            self._store_id, self._batch = str(store_id), batch
            self._read_to = ("", 0)
            self._parts.clear()
            if progress is not None:
                self._remember(database, progress, batch)
            self._most.clear()
            parked.reopen(database, self._retry_s)
            self._any_blocked = parked.any_blocked(database)
            self._is_open = True
        return database

    def _remember(self, database: Connection, progress: Progress, batch: int) -> None:
        """Take over what the log knows of this store's outbox."""
        note = Note.decode(progress.note)
        if note is not None and note.store == self._store_id:
            self._read_to = (note.system, note.lsn)
            self._parts = dict(note.parts)
        if progress.batch > batch:
            self._batch = progress.batch
            self._settle(database, progress, note)

    def _settle(self, database: Connection, progress: Progress, note: Note | None) -> None:
        """Take the batch off the outbox that the log has and the outbox calls unpublished."""
        if note is None or note.store != self._store_id:
            LOGGER.warning(
                "the log's progress is of another store than this one; everything that the "
                "outbox calls unpublished is published"
            )
        elif digest_of(marks.pending_change_ids(database, note.runs)) != note.digest:
            LOGGER.warning(
                "the log's newest batch is not what the outbox has under its ids (was the store "
                "restored from a backup?); its unpublished changes are published"
            )
        else:
            marks.mark(database, self.name, progress.batch, note.runs)

    def _retry_blocked(self, database: Connection) -> int:
        """Try the transaction again that is longest due, alone; says how many changes it moved.

        One a step, and what is refused again takes a quarter of the time at most, so that
        thousands of them do not stand in the way of all else.
        """
        began = time.monotonic()
        if not self._any_blocked or began < self._retry_due:
            return 0
        transaction = parked.take_due(database)
        if transaction is None:
            return 0
        left, moved = transaction, 0
        while left.rows:
            part = self._part(database, left) if self._is_large(transaction) else left
            sent = self._move(database, [part])
            if not sent:
                break
            moved += sent
            parked.release_part(database, part)
            left = Transaction(left.xid, left.rows[sent:])
        if not left.rows:
            parked.release(database, transaction.xid)
            self._any_blocked = parked.any_blocked(database)
        else:
            now = time.monotonic()
            self._retry_due = now + _RETRY_PAUSE * (now - began)
        return moved

    def _move(self, database: Connection, transactions: list[Transaction]) -> int:
        """Publish transactions as one batch and take them off the outbox; 0: it was refused."""
        found = runs([row.id for transaction in transactions for row in transaction.rows])
        rows = read_rows(database, found)
        try:
            return self._publish(database, transactions, rows)
        except Unsendable as refusal:
            for row, reason in refusal.refused:
                self._block(database, row, reason)
        except RecordRefused as refusal:
            blamed = self._narrow(transactions, rows, refusal)
            if blamed is not None:
                self._block(database, blamed, refusal.reason)
        return 0

    def _publish(
        self,
        database: Connection,
        transactions: Sequence[Transaction],
        rows: Mapping[int, OutboxRow],
    ) -> int:
        """Publish a batch and take it off the outbox; says how many changes it had.

        Rows with an id below zero stand in no outbox. Raises Unsendable and RecordRefused: then
        nothing of it is in the log.
        """
        ids = [row.id for transaction in transactions for row in transaction.rows]
        stored = sorted(number for number in ids if number > 0)
        found = runs(stored)
        parts = self._with_parts(transactions)
        records = self._composer.compose(transactions, rows)
        digest = digest_of(rows[number].change_id for number in stored)
        note = Note(self._store_id, found, digest, *self._read_to, parts).encode()
        self._batch += 1
        self._publisher.publish(self._batch, records, note, timeout_s=_PUBLISH_S)
        self._parts = parts
        self._mark(database, found, len(stored))
        PUBLISHED.inc(len(ids))
        return len(ids)

    def _with_parts(self, transactions: Sequence[Transaction]) -> dict[str, tuple[int, int]]:
        """Number the changes of transactions that are sent in parts; what is sent after these."""
        parts = dict(self._parts)
        for transaction in transactions:
            if transaction.xid in parts:
                before, total = parts.pop(transaction.xid)
                transaction.before, transaction.total = before, total
                sent = before + len(transaction.rows)
                if sent < total:
                    parts[transaction.xid] = (sent, total)
        return parts

    def _mark(self, database: Connection, found: marks.Runs, count: int) -> None:
        """Take a published batch of ``count`` rows off the outbox."""
        marks.mark(database, self.name, self._batch, found)

    def _narrow(
        self, transactions: list[Transaction], rows: Mapping[int, OutboxRow], refusal: RecordRefused
    ) -> OutboxRow | None:
        """The change to blame, or ``None``: then the next batches are cut to find it.

        The key that Kafka names may be an innocent neighbour's, so a transaction is blamed only
        when it was refused alone. First suspected is the one with the largest change: nearly
        always it is size.
        """
        if len(transactions) > 1:
            sizes = [max(row.bytes for row in each.rows) for each in transactions]
            at = sizes.index(max(sizes))
            self._most = [1, at] if at else [1]
            return None
        pending = transactions[0].rows
        named = [row for row in pending if row.key == refusal.key]
        return rows[max(named or pending, key=lambda row: row.bytes).id]

    def _block(self, database: Connection, row: OutboxRow, reason: str) -> None:
        LOGGER.error(
            "relay %s: transaction pg:%s stays, with later changes of its keys, because of "
            "%s %r version %d: %s",
            *(self.name, row.xid, row.entity, row.key, row.version, reason),
        )
        self._any_blocked = True
        refused = (row.xid, row.entity, row.key, row.version)
        parked.block(database, refused, reason, self._retry_s)

    def _report(self) -> None:
        with translated(self._config.store_dsn, f"relay {self.name}"):
            oldest_s = marks.oldest_unpublished_s(self._connected()) or 0.0
            blocked = parked.count_blocked(self._connected()) if self._any_blocked else 0
        OLDEST.set(oldest_s)
        BLOCKED.set(blocked)
        if oldest_s > _ALARM_S and not self._alarmed:
            LOGGER.warning("the oldest unpublished change is %.0f s old", oldest_s)
        self._alarmed = oldest_s > _ALARM_S
