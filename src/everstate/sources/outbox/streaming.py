"""The relay that reads by logical replication: low latency, no polling; see decision 13.

What is published is decided by the same list as in the polling relay: a row is unpublished while
it stands in `outbox_pending`. The stream only says *at once*, in commit order and whole
transactions, what has come; so a slot that is new, lost or confirmed too far costs time and no
change: the relay polls until nothing is pending, and then streams on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final

import psycopg
from prometheus_client import Gauge
from psycopg import sql

from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import Fenced, RecordRefused, SlotLost, Unavailable
from everstate.sources.outbox import marks
from everstate.sources.outbox.assemble import Assembler, Streamed
from everstate.sources.outbox.compose import Unsendable
from everstate.sources.outbox.database import Connection
from everstate.sources.outbox.pending import Pending, Transaction
from everstate.sources.outbox.relay import LOGGER, WHOLE_BYTES_MAX, Relay
from everstate.sources.outbox.replication import ReplicationStream
from everstate.sources.outbox.schema import PUBLICATION
from everstate.sources.outbox.slot import (
    SlotStatus,
    create_slot,
    current_lsn,
    drop_slot,
    lsn_text,
    read_slot,
)

HELD = Gauge("everstate_outbox_slot_held_bytes", "WAL that the server keeps for the relay's slot")
SAFE = Gauge(
    "everstate_outbox_slot_safe_bytes", "WAL until the slot is lost; -1: the server has no limit"
)
STREAMING = Gauge("everstate_outbox_streaming", "1 while the relay streams, 0 while it polls")

_WAIT_S: Final = 0.1
_START_S: Final = 10.0
_VISIBLE_S: Final = 20.0
_SLOT_AGAIN_S: Final = 20.0
_SWEEP_EVERY_S: Final = 1.0
_MIB: Final = 1_048_576

# A commit is in the WAL before it is visible: an absent row was published only if its transaction
# is visible to the snapshot that does not have it.
_PUBLISHED: Final = sql.SQL("""
SELECT given.id FROM unnest(%s::bigint[], %s::xid8[]) AS given (id, xid)
WHERE pg_visible_in_snapshot(given.xid, pg_current_snapshot())
    AND NOT EXISTS (
        SELECT FROM everstate_store.outbox_unpublished AS pending WHERE pending.id = given.id
    )
""")

_VISIBLE: Final = sql.SQL("""
SELECT given.xid::text FROM unnest(%s::xid8[]) AS given (xid)
WHERE pg_visible_in_snapshot(given.xid, pg_current_snapshot())
""")

_LEFT: Final = sql.SQL("""
SELECT count(*) FROM everstate_store.outbox_pending
WHERE pg_visible_in_snapshot(xid, %s::pg_snapshot)
""")

_SPOOL: Final = sql.SQL("""
WITH sent AS (
    INSERT INTO everstate_store.outbox (xid, entity, key, version, kind, change_id,
        schema_version, occurred_at, recorded_at, provenance, event, before, after)
    VALUES (%s::xid8, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
    RETURNING id, xid, entity, key, octet_length(after) AS bytes
)
INSERT INTO everstate_store.outbox_pending (id, xid, entity, key, bytes)
SELECT id, xid, entity, key, bytes FROM sent
""")


class StreamingRelay(Relay):
    """Moves the outbox to the log as the WAL brings it, and facts that stand in the WAL only.

    The slot is confirmed after Kafka acknowledged (C10). While a transaction is refused by the
    log, or the slot is new, it polls as `Relay` does, with facts put into the outbox meanwhile.
    Raises SlotLost when the slot is gone and ``store.slot_lost`` is ``stop``.
    """

    def __init__(
        self, config: Config, entity_types: Iterable[EntityType], *, retry_blocked_s: float = 30.0
    ) -> None:
        super().__init__(config, entity_types, retry_blocked_s=retry_blocked_s)
        self._stream: ReplicationStream | None = None
        self._assembler = self._new_assembler()
        self._polls = True
        self._slot_due = 0.0
        self._pid: int | None = None
        self._check_until = 0
        """Transactions that end before it may have been published by polling."""
        self._snapshot: str | None = None
        """What was committed before ``_sweep_at``, until the stream has passed that."""
        self._sweep_at = 0
        self._sweep_due = 0.0
        self._passed: set[str] = set()
        """Transactions that the stream brought while polling; polling has to see them."""
        self._held_alarmed = False

    def close(self) -> None:
        """Give up the connections; the slot stays, and keeps the WAL for the next relay."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        super().close()

    @property
    def _idle_s(self) -> float:
        return super()._idle_s if self._polls else 0.0

    def _opened(self) -> Connection:
        if not self._is_open and self._pid is not None:
            self._refuse_when_replaced(self._connected())
        return super()._opened()

    def _refuse_when_replaced(self, database: Connection) -> None:
        """A relay that lost its stream to another one must not take it back by fencing that."""
        status = read_slot(database, self.name)
        if status.active_pid not in (None, self._pid):
            raise Fenced(
                f"relay {self.name}: another relay reads slot {status.slot} now.",
                advice="Stop this one; start it again only when the other one is gone.",
            )

    def _advance(self, database: Connection) -> int:
        if self._stream is None:
            self._attach(database)
        STREAMING.set(0 if self._polls else 1)
        if not self._polls:
            return self._stream_on(database)
        if self._stream is not None:
            self._spool_what_came(database)
        # A commit is in the WAL before it is visible: first see all that came, then poll.
        is_seen = self._sees_what_passed(database)
        moved = super()._advance(database)
        if not moved and not self._any_blocked and self._stream is not None and is_seen:
            self._watch(database)
        return moved

    def _sees_what_passed(self, database: Connection) -> bool:
        if self._passed:
            found = database.execute(_VISIBLE, [list(self._passed)]).fetchall()
            self._passed.difference_update(xid for (xid,) in found)
        return not self._passed

    def _attach(self, database: Connection) -> None:
        """Begin to read the slot; makes it when it was never made."""
        status = read_slot(database, self.name)
        if status.is_lost:
            self._lose(database, status)
            status = SlotStatus("none")
        self._polls = status.state == "none" or status.polls or self._any_blocked
        if status.state == "none":
            if time.monotonic() < self._slot_due:
                return
            if not create_slot(database, self._store_id, self.name):
                LOGGER.info("relay %s: the slot waits for an open transaction; polling", self.name)
                self._slot_due = time.monotonic() + _SLOT_AGAIN_S
                return
            status = read_slot(database, self.name)
        self._stream = ReplicationStream(self._config.store_dsn, f"everstate-relay-{self.name}")
        system, end = self._stream.system()
        known, lsn = self._read_to
        if known and (known != system or lsn > end):
            LOGGER.warning(
                "the log's progress is of another server, or ahead of this one (restored from a "
                "backup?); facts in the WAL may come again"
            )
        lsn = lsn if known == system and lsn <= end else 0
        self._read_to = (system, max(lsn, status.spooled))
        assert status.slot is not None
        self._start(database, self._stream, status.slot)
        if not self._polls:
            self._watch(database)

    def _start(self, database: Connection, stream: ReplicationStream, slot: str) -> None:
        deadline = time.monotonic() + _START_S
        self._assembler = self._new_assembler()
        while not stream.start(slot, PUBLICATION):
            # Its publisher is fenced already: what still reads the slot is a relay of the past.
            database.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
                " WHERE slot_name = %s AND active_pid IS NOT NULL",
                [slot],
            )
            if time.monotonic() > deadline:
                raise Unavailable(f"relay {self.name}: another session reads slot {slot}")
            time.sleep(0.02)
        self._pid = stream.pid

    def _new_assembler(self) -> Assembler:
        return Assembler(self._whole_rows, WHOLE_BYTES_MAX)

    def _lose(self, database: Connection, status: SlotStatus) -> None:
        if status.state != "foreign":
            if self._config.store.slot_lost == "stop":
                raise SlotLost(str(status.slot), status.state)
            LOGGER.error(
                "relay %s: slot %s is %s; changes are published from the outbox table, facts that "
                "stood in the WAL only are gone",
                *(self.name, status.slot, status.state),
            )
        drop_slot(database, self.name)

    def _watch(self, database: Connection) -> None:
        """Stream from here on; all that may have been polled is looked up until then."""
        self._note_polls(database, False)
        self._polls = False
        self._plan_sweep(database)
        self._check_until = self._sweep_at

    def _note_polls(self, database: Connection, polls: bool) -> None:
        database.execute(
            "UPDATE everstate_store.relay_slot SET polls = %s WHERE name = %s AND polls <> %s",
            [polls, self.name, polls],
        )

    def _plan_sweep(self, database: Connection) -> None:
        """Remember what is committed now: once the stream is past it, none of it is pending."""
        # In this order: whoever is in the snapshot has its commit before the position.
        found = database.execute("SELECT pg_current_snapshot()::text").fetchone()
        self._snapshot = None if found is None else found[0]
        self._sweep_at = current_lsn(database)
        self._sweep_due = time.monotonic() + _SWEEP_EVERY_S

    def _take(self, wait_s: float) -> tuple[list[Streamed], int]:
        """Transactions that came and are new, and how far the stream has been read."""
        stream = self._stream
        assert stream is not None
        batch_rows = self._config.store.relay_batch_rows
        fed = (self._assembler.feed(each) for each in stream.take(wait_s, batch_rows))
        came = [streamed for streamed in fed if streamed is not None]
        read_to = came[-1].end_lsn if came else 0
        if self._assembler.is_between:
            read_to = max(read_to, stream.keepalive_lsn)
        known = self._read_to[1]
        return [streamed for streamed in came if streamed.end_lsn > known], read_to

    def _stream_on(self, database: Connection) -> int:
        assert self._stream is not None
        streamed, read_to = self._take(_WAIT_S)
        moved = 0
        if streamed:
            self._keep_refused(database, streamed)
            moved = self._move_streamed(database, streamed)
        self._stream.confirm(read_to)
        if self._snapshot is None:
            if time.monotonic() >= self._sweep_due:
                self._plan_sweep(database)
        elif read_to >= self._sweep_at:
            self._look_for_left(database)
        return moved

    def _move_streamed(self, database: Connection, streamed: list[Streamed]) -> int:
        if any(each.is_large for each in streamed):
            LOGGER.info("relay %s polls: a source transaction is sent in parts", self.name)
            self._poll_instead(database, streamed)
            return 0
        before = self._read_to
        transactions = self._unpublished(database, streamed)
        self._read_to = (before[0], streamed[-1].end_lsn)
        if not transactions:
            return 0
        rows = {number: row for each in streamed for number, row in each.rows.items()}
        try:
            return self._publish(database, transactions, rows)
        except (Unsendable, RecordRefused) as refusal:
            LOGGER.warning("relay %s polls, because of: %s", self.name, refusal)
            self._read_to = before
            self._poll_instead(database, streamed)
            return 0

    def _poll_instead(self, database: Connection, streamed: Sequence[Streamed]) -> None:
        """Publish these from the outbox table; their facts are put into it."""
        # Before the slot is confirmed: what streams after a restart must not overtake it.
        self._note_polls(database, True)
        self._spool(database, streamed)
        self._polls = True

    def _unpublished(self, database: Connection, streamed: list[Streamed]) -> list[Transaction]:
        """The transactions without what polling was faster with."""
        doubtful = [
            row
            for each in streamed
            if each.end_lsn <= self._check_until
            for row in each.transaction.rows
            if row.id > 0
        ]
        if not doubtful:
            return [each.transaction for each in streamed if each.transaction.rows]
        ids, xids = [row.id for row in doubtful], [row.xid for row in doubtful]
        gone = {number for (number,) in database.execute(_PUBLISHED, [ids, xids]).fetchall()}
        left = [
            Transaction(each.transaction.xid, _without(each.transaction.rows, gone))
            for each in streamed
        ]
        return [transaction for transaction in left if transaction.rows]

    def _mark(self, database: Connection, found: marks.Runs, count: int) -> None:
        """Take the batch off the outbox; a commit may be in the WAL before it is visible."""
        deadline = time.monotonic() + _VISIBLE_S
        while True:
            with database.transaction():
                if marks.mark(database, self.name, self._batch, found) == count:
                    return
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"relay {self.name}: what was published is not pending in the outbox"
                    )
                raise psycopg.Rollback
            time.sleep(0.001)

    def _spool_what_came(self, database: Connection) -> None:
        """While polling: rows are pending anyway; facts are put into the outbox."""
        assert self._stream is not None
        streamed, read_to = self._take(0.0)
        if streamed:
            self._keep_refused(database, streamed)
            self._spool(database, streamed)
        self._stream.confirm(read_to)

    def _spool(self, database: Connection, streamed: Sequence[Streamed]) -> None:
        """Put facts into the outbox: from there on they are blocked and retried as rows are."""
        end = streamed[-1].end_lsn
        self._passed.update(each.transaction.xid for each in streamed if each.transaction.xid)
        facts = [row for each in streamed for row in each.facts]
        if facts:
            with database.transaction():
                for row in facts:
                    database.execute(_SPOOL, row[1:])
                database.execute(
                    "UPDATE everstate_store.relay_slot SET spooled = %s::pg_lsn WHERE name = %s",
                    [lsn_text(end), self.name],
                )
        self._read_to = (self._read_to[0], end)

    def _keep_refused(self, database: Connection, streamed: Iterable[Streamed]) -> None:
        for refused in (one for each in streamed for one in each.refused):
            LOGGER.error("relay %s: a message is no fact: %s", self.name, refused.reason)
            database.execute(
                "INSERT INTO everstate_store.relay_refused (lsn, content, reason)"
                " VALUES (%s::pg_lsn, %s, %s) ON CONFLICT DO NOTHING",
                [lsn_text(refused.lsn), refused.content, refused.reason],
            )

    def _look_for_left(self, database: Connection) -> None:
        """Poll when rows are pending that the stream does not bring: a refill, a lost position."""
        found = database.execute(_LEFT, [self._snapshot]).fetchone()
        self._snapshot = None
        if found is not None and found[0]:
            LOGGER.info(
                "relay %s: %d changes are pending that the slot did not bring; polling",
                *(self.name, found[0]),
            )
            self._polls = True

    def _report(self) -> None:
        super()._report()
        status = read_slot(self._connected(), self.name)
        HELD.set(status.held_bytes)
        SAFE.set(-1 if status.safe_bytes is None else status.safe_bytes)
        limit = self._config.store.slot_alarm_mib * _MIB
        alarmed = status.held_bytes > limit or status.state in ("unreserved", "lost", "dropped")
        if alarmed and not self._held_alarmed:
            LOGGER.warning(
                "the server keeps %.0f MiB of WAL for slot %s (%s): is the log taking changes?",
                *(status.held_bytes / _MIB, status.slot, status.state),
            )
        self._held_alarmed = alarmed


def _without(rows: Iterable[Pending], gone: set[int]) -> list[Pending]:
    return [row for row in rows if row.id not in gone]


def relay_of(config: Config, entity_types: Iterable[EntityType]) -> Relay:
    """The relay that ``store.relay`` asks for."""
    if config.store.relay == "replication":
        return StreamingRelay(config, entity_types)
    return Relay(config, entity_types)
