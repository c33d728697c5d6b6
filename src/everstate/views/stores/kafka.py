"""Views in Kafka: a compacted topic with the name of the view, and one for each version.

Consumers read the topic of the view. When another version is published, one transaction writes the
rows in which the two differ, and tombstones: consumers stay where they are. While a version is
published, each row is written to its own topic and to that of the view, in one transaction.

Kafka does not compare what is written with what is there. So a view has one writer at a time, which
knows the version of each key in the topics to which it writes: it fences the writer before it by
the transactional id of the view, and then reads what that one has written. A file with a lock
keeps the processes of a machine from fencing each other.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import Any, ClassVar, Final, TypeAlias
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types

from everstate.config import Config
from everstate.errors import EverstateError, InvalidView, LogError, ViewRowsMissing
from everstate.log.client import changelog_bytes_max
from everstate.log.consumer import Consumer
from everstate.log.positions import Ends, Offsets
from everstate.log.producer import Producer
from everstate.log.record import OutRecord, Record
from everstate.log.topics import Topics
from everstate.private import private_folder
from everstate.views.stores.documents import batch, finite, reader
from everstate.views.stores.postgres.types import check_range
from everstate.views.tables import KeptTable, Merge

TopicRow: TypeAlias = tuple[bytes, int, bytes | None]
"""Key, version and value; no value: the row is deleted."""

_VERSION: Final = "_version"
_PAGE_ROWS: Final = 5_000
_CONNECT_S: Final = 3.0
"""Each view in Kafka waits so long when it does not answer, in each try."""
_COMMIT_S: Final = 60.0
_SILENT_S: Final = 30.0
_KNOWN_MAX: Final = 3
"""Topics of a view whose keys a process knows: two versions, and which one is published."""
_SETTINGS: Final = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.1",
    "min.compaction.lag.ms": "60000",
    "delete.retention.ms": str(7 * 24 * 3_600_000),  # longer than a task may write late
}
_TEXT: Final = pa.string()
_NONE: Final = hash(None)
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder().decode
_WRITERS: Final[dict[tuple[str, str], _Writer]] = {}
"""The writers of this process, by servers and topic of the view."""


class KafkaRows:
    """The store `kafka`: the Kafka of the log, or that of `[stores.kafka]`."""

    merges: ClassVar[frozenset[Merge]] = frozenset({"row", "append"})
    call_s_max: ClassVar[float] = 300.0

    def __init__(self, config: Config) -> None:
        url = config.stores.server("kafka").url
        self._config = config.replaced("log", bootstrap_servers=url) if url else config
        self._pointer = f"{config.log.prefix}.{config.views.schema_name}"
        self._settings = {**_SETTINGS, "max.message.bytes": str(changelog_bytes_max(config))}

    def install(self, table: KeptTable, schema: pa.Schema) -> None:
        """Create the topic of a version; raises InvalidView for types that JSON cannot hold."""
        for each in schema:
            try:
                reader(each.type)
            except TypeError as cause:
                reason = f"the column {each.name!r} is {each.type}: {cause}."
                raise InvalidView(table.view, reason, advice="CAST it to text.") from None
        with self._topics() as topics:
            self._create(topics, self._topic(table.name))

    def write(self, table: KeptTable, rows: pa.Table, gone: pa.Table) -> None:
        """Write rows and tombstones over lower versions, in one transaction."""
        written = [*_written(table.merge, rows), *_written(table.merge, gone, is_gone=True)]
        with self._must_be_there(table.view, table.name), self._writer(table.view) as writer:
            writer.write(self._topic(table.name), written)

    def rows(self, table: KeptTable, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """All rows; the topic is read twice, and its keys are in memory until the end."""
        with self._must_be_there(table.view, table.name):
            values = (
                _decode(each.value)
                for each in _newest(self._config, self._topic(table.name))
                if each.value is not None
            )
            while page := list(islice(values, _PAGE_ROWS)):
                yield batch(page, schema)

    def drop(self, name: str) -> None:
        """Delete the topic of a version."""
        topic = self._topic(name)
        for writer in list(_WRITERS.values()):
            writer.known.pop(topic, None)
        with self._topics() as topics:
            topics.delete([topic])

    def publish(self, view: str, name: str) -> None:
        """Write to the topic of a view what it lacks of a version, and follow that version."""
        topic, shown = self._topic(name), self._topic(view)
        with self._must_be_there(view, name), self._topics() as topics:
            existing = topics.existing()
            if topic not in existing:
                raise ViewRowsMissing(view, topic)
            self._create(topics, shown)
            with self._writer(view) as writer:
                if writer.shown != topic or shown not in existing:
                    # A consumer that was there first may have let Kafka create it.
                    topics.set_config(shown, self._settings)
                    writer.publish(topic)

    def unpublish(self, view: str) -> None:
        """Delete the topic of a view."""
        shown = self._topic(view)
        with self._topics() as topics:
            if shown in topics.existing():
                self._create(topics, shown)
                with self._writer(view) as writer:
                    writer.publish(None)
                    topics.delete([shown])

    def _topic(self, name: str) -> str:
        return f"{self._pointer}.{name}"

    def _topics(self) -> Topics:
        given = self._config.stores.server("kafka")
        if given.user or given.password or given.ssl_cafile:
            raise ConnectionError("set TLS and logins in [log.options], not in [stores.kafka]")
        topics = Topics(self._config)
        topics.reach(_CONNECT_S)
        return topics

    def _create(self, topics: Topics, name: str) -> None:
        """Create a topic, and that which names the published versions, if they are missing."""
        partitions = self._config.log.partitions
        topics.ensure_raw([self._pointer], partitions=1, settings=self._settings)
        topics.ensure_raw([name], partitions=partitions, settings=self._settings)

    @contextmanager
    def _must_be_there(self, view: str, name: str) -> Iterator[None]:
        """Raise ViewRowsMissing for an error of Kafka when it does not have the topic."""
        try:
            yield
        except LogError:
            with self._topics() as topics:
                if self._topic(name) in topics.existing():
                    raise
            raise ViewRowsMissing(view, self._topic(name)) from None

    @contextmanager
    def _writer(self, view: str) -> Iterator[_Writer]:
        """The writer of a view; no other process of this machine has one meanwhile."""
        shown = self._topic(view)
        place = (self._config.bootstrap_servers, shown)
        folder = private_folder(self._config.project.data_dir / "views")
        with open(folder / f"{shown}.lock", "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            writer = _WRITERS.get(place)
            if writer is None or writer.token != file.read():
                known = {} if writer is None else writer.close()
                writer = _Writer(self._config, self._topics(), shown, self._pointer, known)
                _WRITERS[place] = writer
                file.truncate(0)
                file.write(writer.token)
                file.flush()
            try:
                yield writer
            except BaseException:
                writer.close()
                raise


@dataclass
class _Known:
    """What a process knows of a topic."""

    next: Ends
    """The offsets before which everything is known."""
    owner: str = ""
    """The token of the last writer that has read the topic to its end."""
    values: dict[bytes | None, Any] = field(default_factory=dict)
    """By key: the :func:`_state` in the topic of a version; the name of the published one."""


class _Writer:
    """The only one that writes to the topics of a view, until it is fenced by another one."""

    def __init__(
        self, config: Config, topics: Topics, view: str, pointer: str, known: dict[str, _Known]
    ) -> None:
        """``known``: of the writer before it in this process, which stays true."""
        self._config, self._topics, self.known = config, topics, known
        self._view, self._pointer = view, pointer
        self._producer = Producer(config, transactional_id=view, client_id=view)
        self._offsets = Offsets(config)
        self.token = uuid4().hex
        try:
            self._producer.init(_SILENT_S)
            pointed = self._read(pointer, lambda record: record.value)[0].values.get(view.encode())
        except BaseException:
            self.close()
            raise
        self.shown = pointed and pointed.decode()
        """The topic of the published version."""

    def close(self) -> dict[str, _Known]:
        """End an open transaction, and the connections; what is known remains."""
        self.token = "-"
        with suppress(EverstateError):  # there is none, or the next writer ends it
            self._producer.abort(1.0)
        self._producer.discard()
        return self.known

    def write(self, topic: str, written: Iterable[TopicRow]) -> None:
        """Write over lower versions, also to the topic of the view if it shows this one."""
        # Only a transaction that was committed after the ends were read proves that nobody else
        # wrote before them.
        known, ends = self._read(topic, _state_of)
        states = known.values
        newer = [each for each in written if states.get(each[0], -1) >> 1 < each[1]]
        if newer:
            self._producer.begin()
            self._producer.send_many(_record(topic, *each) for each in newer)
            if self.shown == topic:
                # No tombstones of keys that consumers never had.
                told = (e for e in newer if e[2] is not None or states.get(e[0], 0) & 1)
                self._producer.send_many(_record(self._view, *each) for each in told)
            self._producer.commit(_COMMIT_S)
            states.update((key, _state(version, value)) for key, version, value in newer)
            known.next = ends

    def publish(self, topic: str | None) -> None:
        """Write the rows of a version that the topic of the view lacks; ``None``: no version."""
        self._producer.begin()
        if topic is not None:
            self._producer.send_many(self._differences(topic))
        named = None if topic is None else topic.encode()
        self._producer.send_raw(self._pointer, self._view.encode(), named)
        self._producer.commit(_COMMIT_S)
        self.shown = topic

    def _differences(self, topic: str) -> Iterator[OutRecord]:
        shown = {each.key: hash(each.value) for each in _whole(self._config, self._view)}
        for each in _newest(self._config, topic):
            if shown.pop(each.key, _NONE) != hash(each.value):
                yield OutRecord(self._view, each.key, each.value, each.headers)
        for key, value in shown.items():
            if value != _NONE:
                yield OutRecord(self._view, key, None)

    def _read(self, topic: str, value_of: Callable[[Record], Any]) -> tuple[_Known, Ends]:
        """What is known of a topic, with what others have written; and its ends."""
        self._topics.reach(_CONNECT_S)
        ends = self._offsets.stable_ends([topic])
        known = self.known.pop(topic, None) or _Known(self._offsets.beginnings([topic]))
        self.known[topic] = known
        while len(self.known) > _KNOWN_MAX:
            del self.known[next(iter(self.known))]
        if known.owner != self.token:
            # One record a poll: a poll waits for all that it asks for.
            with Consumer(self._config, at_once=1) as consumer:
                for place, start in known.next.items():
                    for each in consumer.read(*place, start, ends[place]):
                        known.values[each.key] = value_of(each)
            known.next, known.owner = ends, self.token
        return known, ends


def _newest(config: Config, topic: str) -> Iterator[Record]:
    """The newest record of each key."""
    newest = {each.key: each.offset for each in _whole(config, topic)}
    return (each for each in _whole(config, topic) if newest.get(each.key) == each.offset)


def _whole(config: Config, topic: str) -> Iterator[Record]:
    """All records, when the transactions that are open now have ended; raises Unavailable."""
    with Offsets(config) as offsets:
        offsets.settle(topic, _SILENT_S)
    with Consumer(config) as consumer:
        yield from consumer.read_topic(topic)


def _state(version: int, value: bytes | None) -> int:
    """The version of a key, and whether it has a row, in one number, as there are many."""
    return 2 * version + (value is not None)


def _state_of(record: Record) -> int:
    if record.value is None:
        return _state(int(dict(record.headers)[_VERSION] or 0), None)
    return _state(_decode(record.value)[_VERSION], record.value)


def _record(topic: str, key: bytes, version: int, value: bytes | None) -> OutRecord:
    headers = [(_VERSION, str(version).encode())] if value is None else ()
    return OutRecord(topic, key, value, headers)


def _written(merge: Merge, rows: pa.Table, *, is_gone: bool = False) -> Iterator[TopicRow]:
    """Rows with their values as JSON, or the keys that are deleted."""
    versions = rows[_VERSION].to_pylist()
    if merge == "row":
        keys = rows["_key"].cast(pa.binary()).to_pylist()
    else:
        pairs = zip(rows["_key"].to_pylist(), versions, strict=True)
        keys = [f"{key}:{version}".encode() for key, version in pairs]
    if is_gone:
        return zip(keys, versions, repeat(None))
    names, columns = rows.column_names, map(_shown, rows.columns)
    values = (_encode(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True))
    return zip(keys, versions, values, strict=True)


def _shown(values: pa.ChunkedArray) -> list[Any]:
    """Values for JSON; raises ArrowInvalid for a time that Python does not have."""
    kind = values.type
    check_range(values)
    if types.is_timestamp(kind):
        values = pc.binary_replace_slice(values.cast(_TEXT), 10, 11, "T")
    elif types.is_decimal(kind):
        values = values.cast(_TEXT)
    found: list[Any] = values.to_pylist(maps_as_pydicts="strict")
    if types.is_nested(kind) or (
        types.is_floating(kind) and pc.any(pc.invert(pc.is_finite(values))).as_py()
    ):
        found = [finite(value) for value in found]
    return found
