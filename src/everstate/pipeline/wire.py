"""Publishes an entity type also in Debezium's form: `.changes` → `.debezium`."""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from everstate.changes import EntityType
from everstate.changes.debezium import debezium_records
from everstate.config import Config
from everstate.errors import EverstateError, InvalidChange
from everstate.log.consumer import Follower
from everstate.log.positions import Offsets, check_ends
from everstate.log.publisher import OncePublisher
from everstate.log.record import OutRecord
from everstate.log.topics import TopicIdentity, Topics, check_same_topic
from everstate.runtime.worker import Worker

logger = logging.getLogger(__name__)

_RECORDS_MAX: Final = 10_000
_WAIT_S: Final = 0.1


class _Note(msgspec.Struct, frozen=True):
    """What is published with each batch: how far which topic was read."""

    source: TopicIdentity
    positions: dict[int, int]


class DebeziumForm(Worker):
    """Writes every change of one entity type in Debezium's form, once, in the same partitions.

    The records and the position in `.changes` are sent in one Kafka transaction. One process at a
    time; a second one fences the first.
    """

    idle_s = 0.0  # A step waits for records itself.
    retry_s = (2.0, 2.0)

    def __init__(self, config: Config, entity_type: EntityType) -> None:
        self.doing = f"publishing of {entity_type.name} in Debezium's format"
        self._config, self._entity_type = config, entity_type
        self._publisher = OncePublisher(config, f"debezium-{entity_type.name}")
        self._follower: Follower | None = None
        self._note: _Note | None = None
        self._offsets = Offsets(config)
        self._batch = 0
        with Topics(config) as topics:
            self._source = topics.names.changes(entity_type.name)
            self._target = topics.names.debezium(entity_type.name)

    def close(self) -> None:
        """Close the connections."""
        self._publisher.close()
        self._drop()
        self._offsets.close()

    def failed(self, error: EverstateError) -> None:
        """Read again what was not published."""
        self._drop()

    def step(self) -> int:
        """Publish new changes; returns how many.

        Raises Unavailable, Fenced, and, when its positions belong to another log or to records that
        the log has lost, LogIdentityChanged, TopicResized, DataLoss (C8).
        """
        follower, note = self._opened()
        self._offsets.check_partitions([self._source])
        records, positions = [], dict(note.positions)
        key = self._entity_type.key
        changes = follower.poll(_RECORDS_MAX, _WAIT_S)
        for change in changes:
            positions[change.partition] = change.offset + 1
            if change.value is None:
                continue
            try:
                found = debezium_records(change.value, key, self._config.log.prefix)
            except InvalidChange as error:
                # The archive and the keeper report the record; it has no Debezium form.
                logger.warning(
                    "%s: the change at offset %d cannot be written in Debezium's format: %s",
                    self._source,
                    change.offset,
                    error,
                )
                continue
            records += [
                OutRecord(self._target, name, value, partition=change.partition)
                for name, value in found
            ]
        if not changes:
            return 0
        note = _Note(note.source, positions)
        try:
            self._publisher.publish(self._batch + 1, records, msgspec.json.encode(note))
        except BaseException:
            self._drop()
            raise
        self._batch, self._note = self._batch + 1, note
        return len(changes)

    def _opened(self) -> tuple[Follower, _Note]:
        if self._follower is None or self._note is None:
            return self._open()
        return self._follower, self._note

    def _open(self) -> tuple[Follower, _Note]:
        offsets = self._offsets
        with Topics(self._config) as topics:
            topics.ensure([self._entity_type.name])
            topics.ensure_beside(self._source, self._target)
            identity = topics.identity(self._source)
            starts = {part: at for (_, part), at in offsets.beginnings([self._source]).items()}
        progress = self._publisher.open()
        self._batch, note = 0, _Note(identity, starts)
        if progress is not None:
            self._batch, read = progress.batch, msgspec.json.decode(progress.note, type=_Note)
            check_same_topic(self._source, read.source, identity)
            note = _Note(identity, {**starts, **read.positions})
        # Asked later than the positions, which may not be beyond the ends.
        ends = {part: at for (_, part), at in offsets.stable_ends([self._source]).items()}
        who = f"{self._entity_type.name} in Debezium's form"
        check_ends(who, self._source, note.positions, ends)
        places = {(self._source, part): at for part, at in note.positions.items()}
        client_id = f"everstate-debezium-{self._entity_type.name}"
        self._follower, self._note = Follower(self._config, places, client_id=client_id), note
        return self._follower, note

    def _drop(self) -> None:
        if self._follower is not None:
            self._follower.close()
            self._follower = None
