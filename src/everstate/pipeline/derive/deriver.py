"""Keeps one derived topic of accepted changes: each change in it once, in its partition, in order.

Records and position are sent in one Kafka transaction under one transactional id (C2, C3). A new
version is published in a transaction too: it writes a barrier to each partition of the previous
version's topic, which names the next topic and the offset to continue at.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pyspark.sql import SparkSession

from everstate.changes.derived import Derivation, JoinedStream, derivation_of
from everstate.config import Config
from everstate.errors import DataLoss, EverstateError, InvalidDerivation
from everstate.log.client import changelog_bytes_max
from everstate.log.consumer import Follower
from everstate.log.derived import Barrier, DerivedNote, barriers
from everstate.log.positions import Ends, Offsets
from everstate.log.publisher import OncePublisher
from everstate.log.record import OutRecord
from everstate.log.topics import Topics
from everstate.pipeline.derive.building import TopicBuild
from everstate.pipeline.derive.declare import declare_topic, open_topic_version
from everstate.pipeline.derive.joining import JoinGate, entities_as_of, history_vector
from everstate.pipeline.derive.reading import AcceptedChange, AcceptedReader, check_source
from everstate.pipeline.keeping.spans import ArchivedOffsets
from everstate.runtime.worker import Worker
from everstate.views.control import BUILDING, LIVE, Control, ControlConnection, ViewVersion
from everstate.views.project import Project
from everstate.views.tables import Core, KeptTable, covers

logger = logging.getLogger(__name__)

_WAIT_S: Final = 0.1
_JUDGED_S: Final = 0.02
"""How often the core's position is read while records wait for it."""
_HOUR_MS: Final = 3_600_000


class TopicKeeper(Worker):
    """Keeps the versions of one derived topic; one process at a time, a second fences the first."""

    retry_s = (2.0, 2.0)

    def __init__(
        self, config: Config, project: Project, derivation: Derivation, spark: SparkSession
    ) -> None:
        self._config, self._project, self._spark = config, project, spark
        self.name, self.entity = derivation.name, derivation.entity
        self.doing = f"keeping of derived topic {derivation.name}"
        self._declared = derivation
        self._publisher = OncePublisher(config, f"derive-{derivation.name}")
        self._database = ControlConnection(config)
        self._topics, self._offsets = Topics(config), Offsets(config)
        self._source = self._topics.names.changes(self.entity)
        self._note: DerivedNote | None = None
        """The progress in the log, as this process wrote or read it last."""
        self._batch = 0

    def close(self) -> None:
        """Close the connections."""
        self._publisher.close()
        self._database.close()
        self._offsets.close()
        self._topics.close()

    def _ensure(self, topic: str, partitions: int) -> None:
        """Create the topic of a version, if it is not there."""
        retention_ms = int(self._config.log.changes_retention_hours * _HOUR_MS)
        size = str(changelog_bytes_max(self._config))
        settings = {"retention.ms": str(retention_ms), "max.message.bytes": size}
        self._topics.ensure_raw([topic], partitions=partitions, settings=settings)

    def _mirror(self, control: Control, row: ViewVersion, vector: Mapping[int, int]) -> None:
        """Copy a version's position from the log to the registry, which is never ahead."""
        table = KeptTable(self.name, row.version, row.fingerprint, "append")
        known = control.vector(self.name, row.version)
        for partition, offset in vector.items():
            if known.get(partition, offset) < offset:
                control.take_view(table, 1, partition, known[partition], offset)

    def _tell_registry(self, control: Control, published: int | None) -> None:
        """Publish in the registry what is published in the log, as after a kill between the two."""
        rows = control.versions(self.name)
        seen = next((row.version for row in rows if row.published), None)
        if published is not None and published != seen and published in {r.version for r in rows}:
            self._swap(control, seen, published)

    def _opened(self) -> DerivedNote:
        """Fence an earlier process; returns the topic's progress in the log."""
        progress = self._publisher.open()
        self._batch = 0 if progress is None else progress.batch
        return DerivedNote() if progress is None else DerivedNote.read(progress.note)

    def _barriers(
        self,
        seen: int | None,
        version: int,
        starts: Callable[[Sequence[str]], Ends],
        known: Mapping[int, int] | None = None,
    ) -> list[OutRecord]:
        """Barriers that send readers to the start of the next topic; none for the first version.

        ``known``: where in the changelog they go on; nothing where both topics have the same.
        """
        if seen is None:
            return []
        ended, following = (self._topics.names.derived(self.name, v) for v in (seen, version))
        barrier = Barrier(following, version, 0, turn=self._batch + 1)
        return barriers(ended, barrier, _by_partition(starts([following])), known)

    def _publish(self, records: Sequence[OutRecord], note: DerivedNote) -> None:
        """Send records and progress in one transaction."""
        self._publisher.publish(self._batch + 1, records, note.written)
        self._batch, self._note = self._batch + 1, note

    def _swap(self, control: Control, seen: int | None, version: int) -> None:
        """Let the registry say that readers continue with a version, as the log does."""
        with control.connection.transaction():
            control.swap_published(self.name, seen, version)
        logger.info("derived topic %s: readers continue with version %d", self.name, version)


class Deriver(TopicKeeper):
    """Keeps the versions of a topic in which each accepted change is exactly once."""

    def __init__(
        self, config: Config, project: Project, derivation: Derivation, spark: SparkSession
    ) -> None:
        super().__init__(config, project, derivation, spark)
        self._archived = ArchivedOffsets(config)
        self._core = Core(self.entity, self._source)
        self._readers: dict[int, AcceptedReader] = {}
        self._builds: dict[int, TopicBuild] = {}
        self._known: dict[int, Derivation] = {}
        self._gates: dict[int, JoinGate] = {}
        """Of joined streams, by version."""

    def close(self) -> None:
        """End reading and building, and close the connections."""
        self._drop()
        super().close()

    def open(self) -> None:
        """Prepare a run."""
        self.prepare()

    def prepare(self) -> None:
        """Register the declared topic; the core must have been prepared."""
        with self._database.connected() as control:
            step = declare_topic(self._config, control, self._declared)
        if step.what != "same":
            logger.info("derived topic %s: version %d, %s", self.name, step.version, step.what)

    def pause_s(self, done: object) -> float:
        """A step waits for records itself, but not for the core, which judges them."""
        waits_for_core = any(reader.waiting for reader in self._readers.values())
        return _JUDGED_S if waits_for_core and not done else 0.0

    def failed(self, error: EverstateError) -> None:
        """Store the reason, and read again what was not published."""
        self._store_error(error.message)
        self._drop()

    def step(self) -> int:
        """Publish newly accepted changes, and a part of each build; returns the record count.

        Raises Unavailable, Fenced, DataLoss, ViewFailed; none of them loses or doubles a record.
        """
        try:
            return self._step(self._note or self._open())
        except BaseException:
            # Records that were read and not published are read again.
            self._drop()
            raise

    def _step(self, note: DerivedNote) -> int:
        for version, reader in self._readers.items():
            reader.poll(_WAIT_S)
            if version in self._gates:
                self._gates[version].look(reader.read, reader.vector)
        records: list[OutRecord] = []
        after = note.copied()
        with self._database.connected() as control:
            rows = {row.version: row for row in control.versions(self.name)}
            self._follow(control, rows, after)
            with control.snapshot():
                judged = control.core_vector(self.entity)
                for version, reader in self._readers.items():
                    spans = reader.ready(self._joinable(control, version, judged))
                    if spans:
                        taken = reader.take(control, self._core, spans)
                        records += self._records(control, version, taken)
                        after.versions[version] = dict(reader.vector)
                for version, build in list(self._builds.items()):
                    is_open = self._joinable(control, version, build.vector) == build.vector
                    part = build.part() if is_open else []
                    if part is None:
                        after.versions[version] = build.vector
                        after.meanings[version] = rows[version].fingerprint
                    elif part:
                        records += self._records(control, version, part)
                        control.record(self.name, version, progress=build.progress().note())
            if records or after != note:
                self._publish(records, after)
                self._mirror_all(control, rows, after)
            for version in after.versions.keys() & rows.keys():
                if rows[version].error is not None and rows[version].status in (LIVE, BUILDING):
                    control.record(self.name, version, error=None)
                if rows[version].progress is not None:
                    control.record(self.name, version, progress=None)
            self._switch(control, rows, after)
        return len(records)

    def _open(self) -> DerivedNote:
        """As :meth:`_opened`; raises the errors of :func:`check_source`."""
        self._drop()
        note = self._opened()
        with self._database.connected() as control:
            vectors = list(note.versions.values())
            check_source(control, self._topics, self._offsets, self._declared, vectors)
            rows = {row.version: row for row in control.versions(self.name)}
            self._mirror_all(control, rows, note)
            self._tell_registry(control, note.published)
        self._note = note
        return note

    def _drop(self) -> None:
        for reader in self._readers.values():
            reader.close()
        for build in self._builds.values():
            build.close()
        self._readers, self._builds, self._gates, self._note = {}, {}, {}, None

    def _follow(self, control: Control, rows: Mapping[int, ViewVersion], note: DerivedNote) -> None:
        """Start reading or building the versions wanted now, and end those that are not wanted."""
        wanted = {v for v, row in rows.items() if row.status in (LIVE, BUILDING)}
        for version in set(self._readers) - wanted:
            self._readers.pop(version).close()
        for version in set(self._builds) - wanted:
            self._builds.pop(version).close()
        for version in list(note.versions):
            if version not in rows or note.meanings.get(version) != rows[version].fingerprint:
                note.forget(version)
                self._topics.delete([self._topics.names.derived(self.name, version)])
        for version in sorted(wanted):
            if version in self._readers or not self._knows(control, rows[version]):
                continue
            if version in note.versions:
                self._builds.pop(version, None)
                self._read(version, note.versions[version])
            elif version not in self._builds:
                self._begin(control, rows[version], note)

    def _knows(self, control: Control, row: ViewVersion) -> bool:
        """Whether this app can make a version's records; another app may have declared it."""
        if row.version not in self._known:
            try:
                found = derivation_of(row.name, row.definition)
                if found.fingerprint != row.fingerprint:
                    raise InvalidDerivation(
                        row.name,
                        "its definition means something else with this release of everstate.",
                    )
                found.check(self._project.entities)
            except EverstateError as error:
                control.record(row.name, row.version, error=error.message)
                return False
            self._known[row.version] = found
        return True

    def _begin(self, control: Control, row: ViewVersion, note: DerivedNote) -> None:
        """Create the topic of a version, and build it, unless it begins with the log."""
        topic = self._topics.names.derived(self.name, row.version)
        # Drops the records of a build that was killed: the build starts again.
        self._topics.delete([topic])
        self._ensure(topic, self._topics.partitions(self._source))
        vector = control.vector(self.name, row.version)
        if vector and not any(vector.values()):
            note.versions[row.version] = dict(vector)
            note.meanings[row.version] = row.fingerprint
            self._read(row.version, vector)
            return
        vector = self._vector(control)
        with control.connection.transaction():
            control.close_positions(self.name, row.version)
            open_topic_version(control, self._known[row.version], row.version, vector)
        entity_type = self._project.entities[self.entity]
        refused = control.dead_places(self.entity)
        given = (self._spark, self._config, entity_type, vector, refused)
        self._builds[row.version] = TopicBuild(*given)
        self._gate(row.version, vector)

    def _vector(self, control: Control) -> dict[int, int]:
        """The vector to build to; raises DataLoss where the archive lacks changes."""
        core, archived = control.core_vector(self.entity), self._archived.of(self.entity)
        if archived.position and any(archived.begins.get(p, 0) > 0 for p in core):
            raise DataLoss(
                f"the archive of {self.entity} lacks the first changes of the log.",
                advice="Restore the archive; until then the published version stays.",
            )
        return archived.vector(core)

    def _read(self, version: int, vector: Mapping[int, int]) -> None:
        name = f"everstate-derive-{self.name}"
        starts = {(self._source, partition): offset for partition, offset in vector.items()}
        follower = Follower(self._config, starts, client_id=name)
        self._readers[version] = AcceptedReader(follower, vector)
        self._gate(version, {})

    def _gate(self, version: int, built: Mapping[int, int]) -> None:
        """Make the gate of a version, if it is a joined stream; ``built``: what it is built to."""
        form = self._known[version].form
        if isinstance(form, JoinedStream):
            topic = self._topics.names.changes(form.to)
            gate = JoinGate(lambda: _by_partition(self._offsets.stable_ends([topic])))
            gate.look(built, {})
            self._gates[version] = gate

    def _joinable(
        self, control: Control, version: int, judged: Mapping[int, int]
    ) -> Mapping[int, int]:
        """How far a version's records may be taken, of those below ``judged``."""
        form = self._known[version].form
        if not isinstance(form, JoinedStream):
            return judged
        upto = self._gates[version].upto(history_vector(control, form.to))
        return {partition: min(at, upto.get(partition, 0)) for partition, at in judged.items()}

    def _records(
        self, control: Control, version: int, taken: Sequence[AcceptedChange]
    ) -> list[OutRecord]:
        """The records of some accepted changes in a version's topic."""
        derivation = self._known[version]
        form, entity_type = derivation.form, self._project.entities[self.entity]
        topic = self._topics.names.derived(self.name, version)
        firing = [each for each in taken if derivation.takes(entity_type, each.message)]
        if isinstance(form, JoinedStream):
            own_key = form.own_key(self._project.entities)
            asked = [form.wanted(own_key, each.message) for each in firing]
            beside = entities_as_of(control, form.to, asked)
        else:
            beside = [None] * len(firing)
        records = []
        for each, joined in zip(firing, beside, strict=True):
            value = form.value(each.message, joined)
            if value is None:
                continue
            headers = derivation.headers(each.message, each.offset)
            place = (each.partition, each.timestamp_ms)
            records.append(OutRecord(topic, each.key, value, headers, *place))
        return records

    def _mirror_all(
        self, control: Control, rows: Mapping[int, ViewVersion], note: DerivedNote
    ) -> None:
        for version in note.versions.keys() & rows.keys():
            self._mirror(control, rows[version], note.versions[version])

    def _switch(self, control: Control, rows: Mapping[int, ViewVersion], note: DerivedNote) -> None:
        """Publish a built version when it is at the position of the published one."""
        for version, row in rows.items():
            if row.status != BUILDING or version not in note.versions:
                continue
            seen = note.published
            # Equal, not past it: a reader continues right after the previous version's records.
            before = note.versions.get(seen) if seen is not None else note.versions[version]
            if seen == version or note.versions[version] != before:
                continue
            if seen is None and not covers(before, control.core_vector(self.entity)):
                continue
            after = note.copied()
            after.published = version
            # Both versions are at one position now, where the previous version ends. Not the stable
            # ends: a commit returns before its markers are written, and until then these stay
            # before its records, which readers would get once more.
            ending = self._barriers(seen, version, self._offsets.high_watermarks)
            self._publish(ending, after)
            self._swap(control, seen, version)
            return

    def _store_error(self, error: str) -> None:
        """Store in the registry why the topic is behind; `views list` shows it."""
        try:
            with self._database.connected() as control:
                for row in control.versions(self.name):
                    if row.status in (LIVE, BUILDING):
                        control.record(self.name, row.version, error=error)
        except EverstateError as failure:
            logger.warning("derived topic %s: its error cannot be stored: %s", self.name, failure)


def _by_partition(ends: Ends) -> dict[int, int]:
    """The ends of one topic."""
    return {partition: end for (_, partition), end in ends.items()}
