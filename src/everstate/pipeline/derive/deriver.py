"""Keeps one derived topic: each change in it once, in its partition, in order.

Records and position are sent in one Kafka transaction under one transactional id (C2, C3). A new
version is published in a transaction too: it writes a barrier to each partition of the previous
version's topic, which names the next topic and the offset to continue at. A raw topic is made the
same way, but it waits for no verdict of the core.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Final

from everstate.changes import ChangeCodec
from everstate.changes.derived import Derivation, JoinedStream, derivation_of
from everstate.config import Config
from everstate.errors import EverstateError, InvalidDerivation, Unavailable
from everstate.log.derived import Barrier, DerivedNote, barriers
from everstate.log.positions import Ends, Offsets, check_ends
from everstate.log.publisher import OncePublisher
from everstate.log.record import OutRecord
from everstate.log.topics import Topics
from everstate.parts import PartRun
from everstate.pipeline.derive.declare import declare_topic
from everstate.pipeline.derive.joining import JoinGate, entities_as_of, history_vector
from everstate.pipeline.derive.reading import (
    READ_MAX,
    AcceptedChange,
    AcceptedReader,
    UnjudgedReader,
)
from everstate.runtime.worker import Worker, part_of
from everstate.views.control import BUILDING, LIVE, Control, ControlConnection, ViewVersion
from everstate.views.project import Project
from everstate.views.source import RecordSource, Run
from everstate.views.tables import Core, KeptTable, covers

logger = logging.getLogger(__name__)

_WAIT_S: Final = 0.1
_JUDGED_S: Final = 0.02
"""How often the core's position is read while records wait for it."""
_AGAIN_S: Final = 30.0
"""Pause before a version that could not be built is tried again."""
_PART_CHANGES: Final = 2_000
"""Most records of a partition that a version which nobody reads yet takes in a step."""


class Deriver(Worker):
    """Keeps the versions of one derived topic; one process at a time, a second fences the first."""

    retry_s = (2.0, 2.0)

    def __init__(self, config: Config, project: Project, derivation: Derivation) -> None:
        self._config, self._project = config, project
        self.name, self.entity = derivation.name, derivation.entity
        self.doing = f"keeping of derived topic {derivation.name}"
        self._declared = derivation
        self._publisher = OncePublisher(config, f"derive-{derivation.name}")
        self._database = ControlConnection(config)
        self._topics, self._offsets = Topics(config), Offsets(config)
        self._source = self._topics.names.changes(self.entity)
        self._core = Core(self.entity, self._source)
        self._note: DerivedNote | None = None
        """The progress in the log, as this process wrote or read it last."""
        self._batch = 0
        self._known: dict[int, Derivation] = {}
        self._readers: dict[int, AcceptedReader] = {}
        self._ending: dict[int, Future[list[Run]]] = {}
        """What readers that were ended still read, by version: it may be the sort of an archive."""
        self._gates: dict[int, JoinGate] = {}
        """Of joined streams, by version."""
        self._failed: dict[int, tuple[float, str]] = {}
        """Versions that cannot be built: when each is tried again, and why it failed."""

    def close(self) -> None:
        """End reading, and close the connections."""
        self._drop()
        self._publisher.close()
        self._database.close()
        self._offsets.close()
        self._topics.close()

    def open(self) -> None:
        """Register the declared topic; the core must have been prepared."""
        with self._database.connected() as control:
            control.install()
            if not control.core_vector(self.entity):  # the role of raw topics may begin first
                raise Unavailable("the pipeline has not created the tables of the views yet.")
            step = declare_topic(self._config, control, self._declared)
        if step.what != "same":
            logger.info("derived topic %s: version %d, %s", self.name, step.version, step.what)

    def pause_s(self, done: object) -> float:
        """A step waits for records itself, but not for the core, which judges them."""
        return 0.0 if done or self._waits_for_records else _JUDGED_S

    @property
    def _waits_for_records(self) -> bool:
        """Whether there is nothing to do until a record is read."""
        return bool(self._readers) and not any(each.waiting for each in self._readers.values())

    def failed(self, error: EverstateError) -> None:
        """Store in the registry why the topic is behind; `views list` shows it."""
        try:
            with self._database.connected() as control:
                for row in control.versions(self.name):
                    if row.status in (LIVE, BUILDING):
                        control.record(self.name, row.version, error=error.message)
        except EverstateError as failure:
            logger.warning("derived topic %s: its error cannot be stored: %s", self.name, failure)

    def step(self) -> int:
        """Publish newly accepted changes, and a part of each new version; returns the record count.

        Raises Unavailable, Fenced, DataLoss, ViewFailed; none of them loses or doubles a record.
        """
        try:
            return self._step(self._note or self._open())
        except BaseException:
            # Records that were read and not published are read again.
            self._drop()
            raise

    def _step(self, note: DerivedNote) -> int:
        reading = [each for reader in self._readers.values() if (each := reader.read_on())]
        wait(reading, _WAIT_S if self._waits_for_records else 0.0, FIRST_COMPLETED)
        for version, reader in list(self._readers.items()):
            with self._apart(version):
                reader.gather()
                if version in self._gates:
                    self._gates[version].look(reader.read, reader.vector)
        records: list[OutRecord] = []
        after = note.copied()
        with self._database.connected() as control:
            rows = {row.version: row for row in control.versions(self.name)}
            self._follow(control, rows, after)
            with control.snapshot():
                judged = control.core_vector(self.entity)
                for version, reader in list(self._readers.items()):
                    # Readers of the published version do not wait for one that is built.
                    most = _PART_CHANGES if self._is_apart(version) else READ_MAX
                    with self._apart(version):
                        upto = self._joinable(control, version, judged)
                        taken = reader.take(control, self._core, upto, most)
                        if taken:
                            records += self._records(control, version, taken)
                        after.versions[version] = dict(reader.vector)
                        after.meanings[version] = rows[version].fingerprint
            if records or after != note:
                self._publish(records, after)
                self._mirror(control, rows, after.versions)
            for version in rows.keys() & (self._readers.keys() | self._failed.keys()):
                self._tell_state(control, rows[version], judged)
            self._switch(control, rows, after)
        return len(records)

    def _is_apart(self, version: int) -> bool:
        """Whether nobody reads a version, because another one is published."""
        assert self._note is not None
        return self._note.published not in (None, version)

    @contextmanager
    def _apart(self, version: int) -> Iterator[None]:
        """An error in a version that nobody reads ends the reading of its changes only."""
        try:
            yield
        except EverstateError as error:
            if not self._is_apart(version):
                raise
            logger.warning("derived topic %s: version %d: %s", self.name, version, error)
            self._end(version)
            self._failed[version] = (time.monotonic() + _AGAIN_S, error.message)

    def _tell_state(self, control: Control, row: ViewVersion, judged: Mapping[int, int]) -> None:
        """Store how far a version is that is being built, and what ended its reading, if it did."""
        reader, progress = self._readers.get(row.version), None
        error = self._failed[row.version][1] if reader is None else None
        if reader is not None and row.status == BUILDING and not covers(reader.vector, judged):
            progress = reader.progress(judged).note()
        if row.error != error:
            control.record(self.name, row.version, error=error)
        if row.progress != progress:
            control.record(self.name, row.version, progress=progress)

    def _open(self) -> DerivedNote:
        """Fence an earlier process; returns the topic's progress in the log.

        Raises the errors of :meth:`_check_source`.
        """
        self._drop()
        progress = self._publisher.open()
        self._batch = 0 if progress is None else progress.batch
        note = DerivedNote() if progress is None else DerivedNote.read(progress.note)
        with self._database.connected() as control:
            self._check_source(control, note.versions.values())
            rows = {row.version: row for row in control.versions(self.name)}
            self._mirror(control, rows, note.versions)
            self._note = note
            self._tell_registry(control)
        return note

    def _drop(self) -> None:
        for version in list(self._readers):
            self._end(version)
        self._note = None

    def _end(self, version: int) -> None:
        """End the reading of a version's changes, if it is read."""
        self._gates.pop(version, None)
        if (reader := self._readers.pop(version, None)) is not None:
            if (reading := reader.close()) is not None:
                self._ending[version] = reading

    def _follow(self, control: Control, rows: Mapping[int, ViewVersion], note: DerivedNote) -> None:
        """Start reading for the versions wanted now, and end it for those that are not wanted."""
        wanted = {v for v, row in rows.items() if row.status in (LIVE, BUILDING)}
        for version in (self._readers.keys() | self._failed.keys()) - wanted:
            self._end(version)
            self._failed.pop(version, None)
        for version in list(note.versions):
            if version not in rows or note.meanings.get(version) != rows[version].fingerprint:
                note.forget(version)
                self._end(version)
                self._delete(version)
        for version in sorted(wanted - self._readers.keys()):
            is_paused = time.monotonic() < self._failed.get(version, (0.0, ""))[0]
            if version in self._ending:
                # Else each retry would add a thread, and a sort with its files.
                is_paused |= not self._ending[version].done()
            if not is_paused and self._knows(control, rows[version]):
                vector = note.versions.get(version) or self._new(control, rows[version])
                with self._apart(version):
                    self._read(control, version, vector)

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

    def _new(self, control: Control, row: ViewVersion) -> Mapping[int, int]:
        """Create the topic of a version that begins with the first change; returns its position.

        The registry has its position from now on, so that nothing after it is trimmed.
        """
        if self._known[row.version].is_raw and (vector := control.vector(self.name, row.version)):
            return vector  # an earlier release wrote its records, and noted no position in the log
        # Drops the records of a version whose position is gone.
        topic = self._delete(row.version)
        self._topics.ensure_beside(self._source, topic)
        vector = dict.fromkeys(control.core_vector(self.entity), 0)
        # Not while bytes are trimmed by the positions that there were before.
        with control.installing():
            control.close_positions(self.name, row.version)
            control.open_positions(*(self.name, row.version, self.entity, row.fingerprint), vector)
            positions = {f"1/{partition}": offset for partition, offset in vector.items()}
            control.record(self.name, row.version, built={"vector": positions})
        return vector

    def _delete(self, version: int) -> str:
        """Delete the topic of a version, unless another process keeps it; returns its name."""
        assert self._note is not None
        # Only a transaction shows whether another process has fenced this one.
        self._publish([], self._note)
        topic = self._topics.names.derived(self.name, version)
        self._topics.delete([topic])
        return topic

    def _read(self, control: Control, version: int, vector: Mapping[int, int]) -> None:
        """Read the changes of a version from here on; of a joined stream through a gate."""
        derivation = self._known[version]
        source = RecordSource(
            self._config,
            self.entity,
            client_id=f"everstate-derive-{self.name}",
            is_one_of_many=False,
            advice="Restore the archive; until then the published version stays.",
        )
        if derivation.is_raw:
            codec = ChangeCodec(self._project.entities[self.entity])
            self._readers[version] = UnjudgedReader(source, vector, codec)
            return
        trimmed = {part: control.trimmed(self._core, part, 0, at) for part, at in vector.items()}
        self._readers[version] = AcceptedReader(source, vector, trimmed)
        if isinstance(derivation.form, JoinedStream):
            topics = (self._source, self._topics.names.changes(derivation.form.to))
            self._gates[version] = JoinGate(*(partial(self._ends, topic) for topic in topics))

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
        firing = [each for each in taken if derivation.takes(entity_type, each[1])]
        if isinstance(form, JoinedStream):
            own_key = form.own_key(self._project.entities)
            asked = [form.wanted(own_key, message) for _, message in firing]
            beside = entities_as_of(control, form.to, asked)
        else:
            beside = [None] * len(firing)
        records = []
        for (record, message), joined in zip(firing, beside, strict=True):
            value = form.value(message, joined)
            if value is None:
                continue
            headers = derivation.headers(message, record.offset)
            place = (record.partition, record.timestamp_ms)
            records.append(OutRecord(topic, record.key, value, headers, *place))
        return records

    def _switch(self, control: Control, rows: Mapping[int, ViewVersion], note: DerivedNote) -> None:
        """Publish a version when it is at the position of the published one.

        The first version of a raw topic is published at once, and a later one also when it is past
        that position: its readers begin at its first record, and skip changes that they have.
        """
        for version, row in rows.items():
            if row.status != BUILDING or version not in self._readers:
                continue
            seen, mine, is_raw = note.published, note.versions[version], self._known[version].is_raw
            before = mine if seen is None else note.versions.get(seen, {})
            # Equal, not past it: a reader continues right after the previous version's records.
            if seen == version or not (covers(mine, before) if is_raw else mine == before):
                continue
            if is_raw:
                self._replace(control, version, self._offsets.beginnings, before)
                return
            if seen is None and not covers(before, control.core_vector(self.entity)):
                continue
            # Both versions are at one position now, where the previous version ends. Not the stable
            # ends: a commit returns before its markers are written, and until then these stay
            # before its records, which readers would get once more.
            self._replace(control, version, self._offsets.high_watermarks)
            return

    def _check_source(self, control: Control, vectors: Iterable[Mapping[int, int]]) -> None:
        """Raise unless positions in the changelog are still true (C8).

        Raises LogIdentityChanged and TopicResized when the changelog is another one, and
        LogTruncated when it lost records that the derived topic or the core has read.
        """
        source = self._source
        control.check_topic_identity(self.entity, source, self._topics.identity(source))
        read = [*vectors, control.core_vector(self.entity)]
        # The ends are read after the positions: no position may be beyond its end.
        ends = self._ends(source)
        for vector in read:
            check_ends(f"derived topic {self.name}", source, vector, ends)

    def _ends(
        self, topic: str, ask: Callable[[Sequence[str]], Ends] | None = None
    ) -> dict[int, int]:
        """The stable end of each partition of a topic, or another offset that is asked for."""
        found = (ask or self._offsets.stable_ends)([topic])
        return {partition: end for (_, partition), end in found.items()}

    def _mirror(
        self,
        control: Control,
        rows: Mapping[int, ViewVersion],
        vectors: Mapping[int, Mapping[int, int]],
    ) -> None:
        """Copy each version's position from the log to the registry, which is never ahead."""
        for version in vectors.keys() & rows.keys():
            table = KeptTable(self.name, version, rows[version].fingerprint, "append")
            known = control.vector(self.name, version)
            for partition, offset in vectors[version].items():
                if known.get(partition, offset) < offset:
                    control.take_view(table, 1, partition, known[partition], offset)

    def _tell_registry(self, control: Control) -> None:
        """Let the registry say that readers continue with the version that the log says."""
        rows = control.versions(self.name)
        published = None if self._note is None else self._note.published
        seen = next((row.version for row in rows if row.published), None)
        if published is not None and published != seen and published in {r.version for r in rows}:
            with control.connection.transaction():
                control.swap_published(self.name, seen, published)
            logger.info("derived topic %s: readers continue with version %d", self.name, published)

    def _replace(
        self,
        control: Control,
        version: int,
        starts: Callable[[Sequence[str]], Ends],
        known: Mapping[int, int] | None = None,
    ) -> None:
        """Let readers continue with a version: in the log, and then in the registry.

        ``starts``: asks where they go on in its topic; ``known``: where in the changelog, which is
        nothing where both topics have the same.
        """
        assert self._note is not None
        after, seen, ending = self._note.copied(), self._note.published, list[OutRecord]()
        after.published = version
        if seen is not None:
            ended, following = (self._topics.names.derived(self.name, v) for v in (seen, version))
            barrier = Barrier(following, version, 0, turn=self._batch + 1)
            ending = barriers(ended, barrier, self._ends(following, starts), known)
        self._publish(ending, after)
        self._tell_registry(control)

    def _publish(self, records: Sequence[OutRecord], note: DerivedNote) -> None:
        """Send records and progress in one transaction."""
        self._publisher.publish(self._batch + 1, records, note.written)
        self._batch, self._note = self._batch + 1, note


def raw_parts(config: Config, project: Project) -> dict[str, PartRun]:
    """A part for each raw derived topic of a project."""
    return {
        f"derive-{name}": part_of(partial(Deriver, config, project, each))
        for name, each in project.derivations.items()
        if each.is_raw
    }
