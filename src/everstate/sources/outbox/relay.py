"""The relay: publishes committed changes from the outbox to the log, each once and in order."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final

import psycopg
from prometheus_client import Counter, Gauge

from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import EverstateError, RecordRefused, Unavailable
from everstate.log.collector import collector_paused
from everstate.log.publisher import OncePublisher, PublishedProgress, check_progress
from everstate.log.skipping import skip_offsets
from everstate.log.topics import TopicNames
from everstate.runtime.worker import Worker
from everstate.sources.outbox import marks, parked
from everstate.sources.outbox.behind import check_store
from everstate.sources.outbox.compose import (
    Composer,
    OutboxRow,
    Unsendable,
    digest_of,
    read_rows,
)
from everstate.sources.outbox.marks import Note
from everstate.sources.outbox.pending import (
    Transaction,
    first_of,
    prefix,
    read_page,
    runs,
    sendable,
)
from everstate.sources.stores.postgres.bound import check_log
from everstate.sources.stores.postgres.database import OutboxConnection, connect, translated
from everstate.sources.stores.postgres.schema import install

logger = logging.getLogger("everstate.sources.outbox")

OLDEST = Gauge(
    "everstate_outbox_oldest_unpublished_seconds", "Age of the oldest change not in the log"
)
BLOCKED = Gauge("everstate_outbox_blocked_transactions", "Transactions the log does not take")
PUBLISHED = Counter("everstate_outbox_published_changes", "Changes moved to the log")

_BATCH_BYTES_MAX: Final = 32 * 1_048_576
WHOLE_BYTES_MAX: Final = 128 * 1_048_576
"""A larger source transaction is sent in parts, whatever its number of rows."""
_IN_ALL: Final = "SELECT count(*) FROM everstate_store.outbox_pending WHERE xid = %s::xid8"
_PUBLISH_S: Final = 30.0
_OPEN_S: Final = 10.0
_REPORT_EVERY_S: Final = 1.0
_TRIM_EVERY_S: Final = 30.0
_ALARM_S: Final = 30.0
_REFILL_OR_BEGIN: Final = (
    'Publish them again with Relay.refill, or begin a new log: the page "When something is wrong"'
    " has both."
)
_OFFSETS_EACH: Final = 2
"""Offsets that a lost change took at most: its own, and one of its transaction's end."""
_OFFSETS_SPARE: Final = 1_000
"""Offsets of transactions that were aborted."""
_RETRY_PAUSE: Final = 3.0
"""After a retry that fails, the relay waits this multiple of its duration before the next."""


class Relay(Worker):
    """Publishes the outbox of one store to `.changes` and `.state`.

    A batch consists of whole source transactions, in an order that keeps the versions of each key.
    Its records and its number are sent in one Kafka transaction (C2), then its rows are marked as
    published. A source transaction that is too large for one Kafka transaction is sent in several
    batches; the transaction block of each change has its index and the number of all changes. A
    relay that was killed in between reads from the log which batch was sent last, and marks that
    one instead of sending it again (C3). A transaction that the log refuses is blocked, with the
    later changes of its keys, and retried after ``retry_blocked_s`` and then less and less often;
    all other changes are published. The number of blocked transactions does not matter: they are
    parked in a table of their own.

    One thread at a time; a second relay on the same store and prefix fences the first.
    """

    doing = "the relay"
    retry_s = (0.2, 5.0)

    def __init__(
        self,
        config: Config,
        entity_types: Iterable[EntityType],
        *,
        retry_blocked_s: float = 30.0,
    ) -> None:
        self._config = config
        self._retry_s = retry_blocked_s
        self._entity_types = tuple(entity_types)
        self._composer = Composer(config, self._entity_types)
        watched = [TopicNames(config.log.prefix).changes(each.name) for each in self._entity_types]
        self._publisher = OncePublisher(config, "relay-main", watched=watched)
        self._database: OutboxConnection | None = None
        self._is_open = False
        self._store_id = ""
        self._batch = 0
        self._page_rows = config.store.relay_batch_rows
        self._parts: dict[str, tuple[int, int]] = {}
        """Transactions that are sent in parts: number of changes in the log, and of all."""
        self._any_blocked = False
        self._report_due = 0.0
        self.idle_s = config.store.relay_poll_ms / 1000
        self._retry_due = 0.0
        """When the next blocked transaction may be retried (monotonic time)."""
        self._alarmed = False
        self._most: list[int] = []
        """Size limits of the next batches, in transactions, while searching for a refused one."""

    def close(self) -> None:
        """Close the connections; unpublished changes stay unpublished."""
        self._is_open = False
        self._publisher.close()
        if self._database is not None:
            with suppress(psycopg.Error):
                self._database.close()
            self._database = None

    def run(self, stop: threading.Event) -> None:
        """Publish changes until ``stop`` is set; waits while a server is down.

        Raises Fenced when another relay took over, LogTruncated when the log lost batches that
        were published, StoreBehindLog when the store was restored to an older state, and LogError
        for other errors that do not pass.
        """
        ended = threading.Event()
        trimmer = threading.Thread(
            target=self._keep_trimmed, args=(ended,), name="trim", daemon=True
        )
        trimmer.start()
        try:
            super().run(stop)
        finally:
            ended.set()
            trimmer.join()

    def may_pass(self, error: EverstateError) -> bool:
        """Only of a server that is down."""
        return isinstance(error, Unavailable)

    def step(self) -> int:
        """Publish one batch; returns its number of changes, 0 when there is nothing to publish.

        Raises Unavailable when a server is down: nothing is lost, call again.
        """
        try:
            with collector_paused(), translated(self._config.store_dsn, self.doing):
                moved = self._advance(self._opened())
                if time.monotonic() >= self._report_due:
                    self._report()
                    self._report_due = time.monotonic() + _REPORT_EVERY_S
                return moved
        except Unavailable:
            self.close()
            raise

    def _advance(self, database: OutboxConnection) -> int:
        """Publish one batch of the pending rows of the outbox."""
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
        """Whether a transaction is too large for one Kafka transaction."""
        return len(transaction.rows) > self._whole_rows or transaction.bytes > WHOLE_BYTES_MAX

    def _part(self, database: OutboxConnection, transaction: Transaction) -> Transaction:
        """The first changes of a transaction that fit into a batch."""
        if transaction.xid not in self._parts:
            found = database.execute(_IN_ALL, [transaction.xid]).fetchone()
            self._parts[transaction.xid] = (0, found[0] if found is not None else 0)
        return transaction.part(self._config.store.relay_batch_rows, _BATCH_BYTES_MAX)

    def trim(self) -> int:
        """Delete rows published more than ``store.outbox_keep_hours`` ago; returns how many.

        Uses a connection of its own, so that publishing does not wait for it. Raises Unavailable.
        """
        dsn, doing = self._config.store_dsn, "trimming the outbox"
        with translated(dsn, doing), connect(dsn, "everstate-trim") as database:
            return marks.trim(database, self._config.store.outbox_keep_hours * 3600)

    def _keep_trimmed(self, ended: threading.Event) -> None:
        """Trim periodically; a failure is logged, and trimming is tried again later."""
        while not ended.wait(_TRIM_EVERY_S):
            try:
                self.trim()
            except EverstateError as error:
                logger.warning("the outbox is not trimmed: %s", error.message)

    def refill(self, since: datetime) -> int:
        """Publish kept changes again that were published since then; returns how many.

        For a log that lost its newest records (C3). Ids and versions stay the same, so a change
        that the log still has becomes a duplicate, and changes no view. They are published after
        all offsets that the log can have lost, so that no reader has passed them already (C8).
        Cost: some bytes of the log and some microseconds for each change and partition.
        """

        def skip(entity: str, count: int) -> None:
            topic = TopicNames(self._config.log.prefix).changes(entity)
            skip_offsets(self._config, topic, _OFFSETS_EACH * count + _OFFSETS_SPARE)

        with translated(self._config.store_dsn, "refilling the log"):
            return marks.refill(self._connected(), since, skip)

    def _connected(self) -> OutboxConnection:
        if self._database is None:
            self._database = connect(self._config.store_dsn, "everstate-relay")
        return self._database

    def _opened(self) -> OutboxConnection:
        database = self._connected()
        if not self._is_open:
            install(database, ())
            check_log(database, self._config, [each.name for each in self._entity_types])
            progress = self._publisher.open(_OPEN_S)
            store_id, batch, begun = marks.newest_batch(database)
            check_progress(self.doing, progress, batch, begun, advice=_REFILL_OR_BEGIN)
            self._publisher.check_tails(self.doing, begun, advice=_REFILL_OR_BEGIN)
            self._store_id, self._batch = str(store_id), batch
            self._parts.clear()
            if progress is not None:
                self._remember(database, progress, batch)
            self._most.clear()
            parked.reopen(database, self._retry_s)
            self._any_blocked = parked.any_blocked(database)
            self._is_open = True
        return database

    def _remember(
        self, database: OutboxConnection, progress: PublishedProgress, batch: int
    ) -> None:
        """Load the progress that the log has recorded for this store's outbox."""
        note = Note.decode(progress.note)
        if note is not None and note.store == self._store_id:
            self._parts = dict(note.parts)
        if progress.batch > batch:
            self._batch = progress.batch
            if not self._settle(database, progress, note):
                check_store(database, self._config, self._entity_types, self.doing)

    def _settle(
        self, database: OutboxConnection, progress: PublishedProgress, note: Note | None
    ) -> bool:
        """Mark the batch that the log has but the outbox still has as unpublished.

        ``False``: the outbox does not have it. The store is another one, or an older copy.
        """
        if note is None or note.store != self._store_id:
            return False
        if digest_of(marks.pending_change_ids(database, note.runs)) != note.digest:
            return False
        marks.mark(database, progress.batch, note.runs)
        return True

    def _retry_blocked(self, database: OutboxConnection) -> int:
        """Retry the blocked transaction that is overdue longest; returns its published changes.

        It gets batches of its own. There is one retry in each step, and retries that fail take at
        most a quarter of the time, so that thousands of them do not hold up other changes.
        """
        began = time.monotonic()
        if not self._any_blocked or began < self._retry_due:
            return 0
        transaction = parked.take_due(database)
        if transaction is None:
            return 0
        moved, count, is_large = 0, len(transaction.rows), self._is_large(transaction)
        at_most = self._config.store.relay_batch_rows if is_large else count
        while moved < count:
            part = Transaction(transaction.xid, transaction.rows[moved : moved + at_most])
            if is_large:
                part = self._part(database, part)
            sent = self._move(database, [part])
            if not sent:
                break
            moved += sent
            parked.release_part(database, part)
        if moved == count:
            parked.release(database, transaction.xid)
            self._any_blocked = parked.any_blocked(database)
        else:
            now = time.monotonic()
            self._retry_due = now + _RETRY_PAUSE * (now - began)
        return moved

    def _move(self, database: OutboxConnection, transactions: list[Transaction]) -> int:
        """Publish transactions as one batch and mark them; returns 0 when it was refused."""
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
        database: OutboxConnection,
        transactions: Sequence[Transaction],
        rows: Mapping[int, OutboxRow],
    ) -> int:
        """Publish a batch and mark it in the outbox; returns its number of changes.

        Raises Unsendable and RecordRefused: then no record of the batch is in the log.
        """
        ids = [row.id for transaction in transactions for row in transaction.rows]
        found = runs(ids)
        parts = self._with_parts(transactions)
        records = self._composer.compose(transactions, rows)
        digest = digest_of(rows[number].change_id for number in sorted(ids))
        note = Note(self._store_id, found, digest, parts).encode()
        self._batch += 1
        self._publisher.publish(self._batch, records, note, timeout_s=_PUBLISH_S)
        self._parts = parts
        marks.mark(database, self._batch, found)
        PUBLISHED.inc(len(ids))
        return len(ids)

    def _with_parts(self, transactions: Sequence[Transaction]) -> dict[str, tuple[int, int]]:
        """Number the changes of transactions sent in parts; returns ``_parts`` after this batch."""
        parts = dict(self._parts)
        for transaction in transactions:
            if transaction.xid in parts:
                before, total = parts.pop(transaction.xid)
                transaction.before, transaction.total = before, total
                sent = before + len(transaction.rows)
                if sent < total:
                    parts[transaction.xid] = (sent, total)
        return parts

    def _narrow(
        self, transactions: list[Transaction], rows: Mapping[int, OutboxRow], refusal: RecordRefused
    ) -> OutboxRow | None:
        """The change that caused the refusal; ``None``: the next batches are cut to find it.

        The key in Kafka's error may belong to another record of the batch, so a transaction is
        blocked only when a batch of only that transaction was refused. The one with the largest
        change is tried first, because the cause is nearly always size.
        """
        if len(transactions) > 1:
            sizes = [max(row.bytes for row in each.rows) for each in transactions]
            at = sizes.index(max(sizes))
            self._most = [1, at] if at else [1]
            return None
        pending = transactions[0].rows
        named = [row for row in pending if row.key == refusal.key]
        return rows[max(named or pending, key=lambda row: row.bytes).id]

    def _block(self, database: OutboxConnection, row: OutboxRow, reason: str) -> None:
        logger.error(
            "relay: transaction pg:%s stays, with later changes of its keys, because of "
            "%s %r version %d: %s",
            *(row.xid, row.entity, row.key, row.version, reason),
        )
        self._any_blocked = True
        refused = (row.xid, row.entity, row.key, row.version)
        parked.block(database, refused, reason, self._retry_s)

    def _report(self) -> None:
        oldest_s = marks.oldest_unpublished_s(self._connected()) or 0.0
        blocked = parked.count_blocked(self._connected()) if self._any_blocked else 0
        OLDEST.set(oldest_s)
        BLOCKED.set(blocked)
        if oldest_s > _ALARM_S and not self._alarmed:
            logger.warning("the oldest unpublished change is %.0f s old", oldest_s)
        self._alarmed = oldest_s > _ALARM_S
