"""Cleaning an outbox: what Debezium's outbox router wrote becomes changes, each once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Final

from everstate.changes import EntityType
from everstate.changes.codec import headers_of
from everstate.config import Config
from everstate.log.record import OutRecord
from everstate.sources.cdc.cleaning import CleanedBatch, Cleaning, Place
from everstate.sources.cdc.declaration import Capture
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.outbox_reading import RoutedReader, routed
from everstate.sources.cdc.outbox_versioning import OutboxVersioner
from everstate.sources.cdc.reading import RefusedRow
from everstate.sources.cdc.versioning import Batch, RawPlace

REMEMBER_EVERY_S: Final = 5.0


class OutboxCleaning(Cleaning):
    """Cleans one capture of an outbox; used as :class:`Cleaning` is.

    The service's own versions are kept. A row is published when the version before it is in the
    log; until then it is held, and a row that cannot be read, or that does not continue its
    entity, is a dead letter: the version is awaited from a corrected row.
    """

    def __init__(
        self,
        config: Config,
        capture: Capture,
        entities: Mapping[str, EntityType],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(config, capture, entities, clock=clock)
        known = self.reader.entities
        self.reader = RoutedReader(capture, known, message_bytes_max=config.log.message_bytes_max)

    def step(self) -> CleanedBatch | None:
        """Publish what is ready, as one batch; ``None``: there is nothing.

        Raises HeldOverflow, Unavailable and other errors of the log: `open` again, then go on.
        """
        started, now_s = time.perf_counter(), self._clock()
        state = self._state
        assert state is not None, "open() comes first"
        if now_s >= self._remember_at:
            self._remember(state)
            self._remember_at = now_s + REMEMBER_EVERY_S
        taken = self._ready(now_s)
        rows = list(self._rows(taken))
        versioner = OutboxVersioner(
            self._capture,
            self.reader.entities,
            state,
            self._held,
            held_max=self._config.pipeline.held_max,
        )
        batch = versioner.run(rows, now_s)
        for place, count in taken.items():
            for _ in range(count):
                self._queues[place].rows.popleft()
        at = self._note_positions()
        if at == self._published and not (batch.changes or batch.held_changed or batch.refused):
            return None
        records = self._messages(batch)
        records += self._held_records(batch) + self._dead_letters(batch.refused)
        self._publish(records, at)
        waiting = {entity: self._held.get(entity) for entity in batch.held_changed}
        held = {entity: None if one is None else one.encode() for entity, one in waiting.items()}
        state.commit(batch.touched, held, {})
        self._is_behind = False
        return self._told(batch, len(rows), time.perf_counter() - started)

    def _rows(self, taken: Mapping[Place, int]) -> Iterator[tuple[RawPlace, CleanRow | RefusedRow]]:
        """Rows that were taken, partition by partition: all of a key are in one of them."""
        for (topic, partition), count in taken.items():
            for offset, listed in islice(self._queues[topic, partition].rows, count):
                for row in listed:
                    yield RawPlace(topic, partition, offset), row

    def _messages(self, batch: Batch) -> list[OutRecord]:
        """Records of `.changes` in order, then the newest of each entity for `.state` (C2)."""
        names = self._topics.names
        records: list[OutRecord] = []
        newest: dict[tuple[str, str], OutRecord] = {}
        for one in batch.changes:
            said, key = routed(one.row), one.key.encode()
            headers = headers_of(
                one.entity,
                said.id,
                one.key,
                said.kind,
                said.recorded_at,
                said.provenance.service_name,
                None if said.event is None else said.event.type,
            )
            records.append(OutRecord(names.changes(one.entity), key, one.row.state, headers))
            state = OutRecord(names.state(one.entity), key, one.row.state, headers)
            newest[one.entity, one.key] = state
        return [*records, *newest.values()]
