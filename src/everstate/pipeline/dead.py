"""Publishing dead letters: from the table of dead changes to `.dead` topics, exactly once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg

from everstate.config import Config
from everstate.errors import EverstateError, Unavailable
from everstate.log.consumer import Consumer
from everstate.log.publisher import OncePublisher
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames
from everstate.telemetry import without_secret
from everstate.views import control

log = logging.getLogger(__name__)

_BATCH_ROWS: Final = 500
_POLL_S: Final = 1.0
_RETRY_S: Final = 5.0
_REASON, _TOPIC, _PARTITION, _OFFSET = (
    "everstate_reason",
    "everstate_topic",
    "everstate_partition",
    "everstate_offset",
)


class DeadLetterSender:
    """Sends each dead change once: its original key, value and headers, and why and where.

    The keeper records dead changes in the transaction that moves the position; this publishes
    them in numbered batches (C19). One process at a time; a second one is fenced.
    """

    def __init__(self, config: Config) -> None:
        self._config, self._schema = config, config.views.schema_name
        self._names = TopicNames(config.log.prefix)
        self._publisher = OncePublisher(config, "dead-letters")
        self._consumer = Consumer(config, client_id="everstate-dead-letters")
        self._opened = False

    def close(self) -> None:
        """Give up the connections to the log."""
        self._publisher.close()
        self._consumer.close()

    def run(self, stop: threading.Event) -> None:
        """Send what is recorded until ``stop`` is set; trouble that may pass is waited out."""
        while not stop.is_set():
            pause = _POLL_S
            try:
                while self.step():
                    pass
            except EverstateError as error:
                if not error.retryable:
                    raise
                log.warning("dead letters wait %.0f s: %s", _RETRY_S, error)
                self._opened, pause = False, _RETRY_S
            stop.wait(pause)

    def step(self) -> int:
        """Publish one batch; returns how many dead letters it had.

        A batch is numbered in the table before it is published, so that after a kill the log's
        progress says whether it went out. Raises Unavailable, Fenced, RecordRefused.
        """
        with self._connected() as connection:
            rows = control.unpublished_dead(connection, self._schema, _BATCH_ROWS)
            if not rows:
                return 0
            if not self._opened:
                self._publisher.open()
                self._opened = True
            numbered = [row for row in rows if row.batch is not None]
            if numbered:
                batch = numbered[0].batch
                assert batch is not None
                rows = [row for row in rows if row.batch == batch]
            else:
                batch = control.last_dead_batch(connection, self._schema) + 1
                control.assign_dead(connection, self._schema, batch, [row.id for row in rows])
            note = f"{rows[0].id}-{rows[-1].id}".encode()
            self._publisher.publish(batch, [self._record(row) for row in rows], note)
            control.mark_dead_published(connection, self._schema, batch)
            log.warning("%d dead letters were sent (batch %d)", len(rows), batch)
            return len(rows)

    def _record(self, row: control.DeadChange) -> OutRecord:
        place = [
            (_REASON, row.reason.encode()),
            (_TOPIC, row.topic.encode()),
            (_PARTITION, str(row.partition).encode()),
            (_OFFSET, str(row.offset).encode()),
        ]
        key, value, headers = row.raw_key, row.raw_value, row.headers
        if not headers:
            # Only unreadable records bring their headers along; a conflict is read again.
            for original in self._consumer.read(
                row.topic, row.partition, row.offset, row.offset + 1
            ):
                key, value, headers = original.key, original.value, original.headers
        return OutRecord(self._names.dead(row.entity), key, value, [*headers, *place])

    @contextmanager
    def _connected(self) -> Iterator[psycopg.Connection[Any]]:
        dsn = self._config.views_dsn
        try:
            with psycopg.connect(dsn, autocommit=True) as connection:
                yield connection
        except psycopg.OperationalError as cause:
            raise Unavailable(
                f"the views' database does not answer ({without_secret(dsn)}): "
                f"{str(cause).strip().splitlines()[0]}"
            ) from cause
