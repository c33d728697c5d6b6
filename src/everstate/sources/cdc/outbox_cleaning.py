"""Cleaning an outbox: what Debezium's outbox router wrote becomes changes, each once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from everstate.changes import EntityType
from everstate.changes.codec import headers_of
from everstate.config import Config
from everstate.log.record import OutRecord
from everstate.sources.cdc.backlog import SourceRows
from everstate.sources.cdc.cleaning import Cleaning
from everstate.sources.cdc.declaration import Capture
from everstate.sources.cdc.local_state import LocalState
from everstate.sources.cdc.outbox_reading import RoutedReader, routed
from everstate.sources.cdc.outbox_versioning import OutboxVersioner
from everstate.sources.cdc.versioning import Batch


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

    def _made(
        self, rows: SourceRows, state: LocalState, now_s: float
    ) -> tuple[Batch, list[OutRecord]]:
        """The service's versions, each behind the one before it, and their records (C2)."""
        versioner = OutboxVersioner(
            self._capture,
            self.reader.entities,
            state,
            self._held,
            held_max=self._config.pipeline.held_max,
        )
        batch = versioner.run(rows, now_s)
        return batch, self._records(batch)

    def _records(self, batch: Batch) -> list[OutRecord]:
        """Records of `.changes` in order, then the newest of each entity for `.state`."""
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
