"""Publishing dead letters: from the table of dead changes to `.dead` topics, exactly once."""

from __future__ import annotations

import logging
from typing import Final

from everstate.config import Config
from everstate.errors import DataLoss, EverstateError, RecordRefused
from everstate.log.consumer import Consumer
from everstate.log.dead_letters import place_headers
from everstate.log.publisher import OncePublisher
from everstate.log.record import Header, OutRecord
from everstate.log.topics import TopicNames
from everstate.runtime.worker import Worker
from everstate.views.control import Control, DeadChange, opened_control

logger = logging.getLogger(__name__)

_BATCH_ROWS: Final = 500
_LOST: Final = ("everstate_headers", b"lost with the log's record")


class DeadLetterSender(Worker):
    """Sends each dead change once: original key, value and headers, its reason and its place.

    The keeper records dead changes in the transaction that moves the position; the sender
    publishes them in numbered batches (C19). One process at a time; a second one is fenced. A dead
    letter that the log refuses stays in the table with the reason; later ones are sent.
    """

    doing = "sending of dead letters"
    retry_s = (5.0, 5.0)

    def __init__(self, config: Config) -> None:
        self._config = config
        self._names = TopicNames(config.log.prefix)
        self._consumer = Consumer(config, client_id="everstate-dead-letters")
        self._publisher: OncePublisher | None = None
        self._published = 0
        """Number of the newest batch in the log."""
        self._is_installed = False
        self._rows_max = _BATCH_ROWS

    def close(self) -> None:
        """Close the connections to the log."""
        self._close_publisher()
        self._consumer.close()

    def failed(self, error: EverstateError) -> None:
        """Open the publisher again."""
        self._close_publisher()

    def step(self) -> int:
        """Publish one batch; returns how many dead letters it had.

        A batch is numbered in the table before it is published, above every number in the table
        and the log, so that after a kill the progress in the log shows whether the batch was
        published. Raises Unavailable, Fenced.
        """
        with opened_control(self._config) as control:
            if not self._is_installed:
                # In a new project this may run before the keeper, which also creates the tables.
                control.install()
                self._is_installed = True
            rows = control.unpublished(self._rows_max)
            if not rows:
                self._rows_max = _BATCH_ROWS
                return 0
            publisher = self._opened(control)
            # A table that was restored from a backup may be behind the log.
            ids = [row.id for row in rows]
            batch = rows[0].batch or control.number(ids, above=self._published)
            if batch > self._published:
                note = f"{rows[0].id}-{rows[-1].id}".encode()
                try:
                    publisher.publish(batch, [self._record(row) for row in rows], note)
                except RecordRefused as refusal:
                    self._refused(control, batch, rows, refusal)
                    return len(rows)
                self._published = batch
            control.mark_published(batch)
            logger.warning(
                "%d records were published to the dead-letter topic (batch %d)", len(rows), batch
            )
            return len(rows)

    def _opened(self, control: Control) -> OncePublisher:
        if self._publisher is None:
            # Views whose database was made again count batches from 1 again, under another name.
            name = f"dead-letters-{control.views_id()}"
            publisher = OncePublisher(self._config, name)
            progress = publisher.open()
            self._publisher = publisher
            self._published = progress.batch if progress is not None else 0
        return self._publisher

    def _close_publisher(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def _refused(
        self,
        control: Control,
        batch: int,
        rows: list[DeadChange],
        refusal: RecordRefused,
    ) -> None:
        """Send one at a time until the dead letter is found that the log refuses."""
        control.dissolve(batch)
        self._rows_max = 1
        if len(rows) == 1:
            logger.error(
                "the record %s cannot be published to the dead-letter topic, and stays in the "
                "table: %s",
                _place(rows[0]),
                refusal,
            )
            control.mark_refused(rows[0].id, refusal.reason)

    def _record(self, row: DeadChange) -> OutRecord:
        place = place_headers(row.reason.encode(), row.topic, row.partition, row.offset)
        headers = [*self._headers(row), *place]
        return OutRecord(self._names.dead(row.entity), row.raw_key, row.raw_value, headers)

    def _headers(self, row: DeadChange) -> list[Header]:
        """Headers are stored only for unreadable records; a conflict's record is read again."""
        if row.headers:
            return list(row.headers)
        try:
            place = (row.topic, row.partition, row.offset, row.offset + 1)
            for found in self._consumer.read(*place):
                # A topic that was made again has another record at this offset.
                if (found.key, found.value) == (row.raw_key, row.raw_value):
                    return list(found.headers)
        except DataLoss:
            pass
        logger.warning("the log no longer has the dead record %s", _place(row))
        return [_LOST]


def _place(row: DeadChange) -> str:
    return f"{row.topic}[{row.partition}]@{row.offset}"
