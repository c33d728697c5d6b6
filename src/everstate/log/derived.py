"""Derived topics as their readers and their publisher see them: the public name, and barriers.

A derived topic has a physical topic for each version. Its public name refers to the published
version. When another version replaces it, each partition of the old topic ends with a barrier: a
record with the next version and the offset in its topic from which to resume.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from everstate.changes.derived import BARRIER, KIND, OFFSET, PROVENANCE, VERSION
from everstate.closing import Closing
from everstate.config import Config
from everstate.errors import DataLoss, InvalidQuery, NotFound
from everstate.log.consumer import Follower
from everstate.log.positions import Offsets
from everstate.log.publisher import OncePublisher, read_progress
from everstate.log.record import Record
from everstate.log.topics import TopicNames, Topics

Start = Literal["beginning", "now"]
_RECORDS_MAX: Final = 10_000
_POLL_S: Final = 0.2


class Barrier(msgspec.Struct, frozen=True):
    """The last record of a partition of a version that was replaced."""

    next: str
    version: int
    offset: int


class DerivedNote(msgspec.Struct):
    """The progress note of a derived topic: the position of each version, and the published one.

    ``versions``: version → partition of the changelog → next offset.
    """

    versions: dict[int, dict[int, int]] = {}
    published: int | None = None
    meanings: dict[int, str] = {}
    """Fingerprint of each version: a new registry may number its versions from 1 again."""

    @classmethod
    def read(cls, note: bytes) -> DerivedNote:
        """Parse a note from its bytes."""
        return msgspec.json.decode(note, type=cls)

    @property
    def written(self) -> bytes:
        """The note as bytes; equal notes give equal bytes."""
        versions = {v: dict(sorted(at.items())) for v, at in sorted(self.versions.items())}
        meanings = dict(sorted(self.meanings.items()))
        return msgspec.json.encode(DerivedNote(versions, self.published, meanings))

    def copied(self) -> DerivedNote:
        """A copy that may be changed."""
        versions = {version: dict(at) for version, at in self.versions.items()}
        return DerivedNote(versions, self.published, dict(self.meanings))

    def forget(self, version: int) -> None:
        """Remove a version that is gone, or that was another one with the same number."""
        self.versions.pop(version, None)
        self.meanings.pop(version, None)
        if self.published == version:
            self.published = None


@dataclass(frozen=True, slots=True)
class DerivedRecord:
    """One record of a derived topic, and the change that it was made from."""

    key: str | None
    value: Any
    """The value as JSON: a patch is a list of operations."""
    version: int
    """Version of the entity."""
    id: str
    """Id of the change."""
    kind: str
    provenance: Mapping[str, Any]
    changed_at: tuple[int, int]
    """Partition and offset of the change in its changelog."""
    topic_version: int
    token: str
    """Token to resume after this record and those returned before it."""


class DerivedReader(Closing):
    """Reads a derived topic by its public name, from one version to the next; one thread.

    Each record of an accepted topic is returned once. A raw topic may have a change twice; the
    reader keeps the newest version of each key in memory and skips records that are not newer.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        *,
        start: Start = "beginning",
        token: str | None = None,
        is_raw: bool = False,
    ) -> None:
        """``token``: resume after the record that it came with. Raises NotFound, InvalidQuery."""
        self._config, self._name = config, name
        self._names = TopicNames(config.log.prefix)
        self._seen: dict[str, int] | None = {} if is_raw else None
        self._places = self._read_token(token) if token else self._first(start)
        self._follower: Follower | None = None

    def close(self) -> None:
        """Close the connection."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None

    @property
    def token(self) -> str:
        """Token to resume after the records returned so far; valid for this topic only."""
        return msgspec.json.encode([self._name, self._places]).decode()

    def records(
        self, *, idle_s: float | None = None, stop: threading.Event | None = None
    ) -> Generator[DerivedRecord, None, None]:
        """Records as they are appended; ends after ``idle_s`` without one, or when ``stop`` is set.

        Raises DataLoss when the next records are gone: their version was replaced long ago and its
        topic deleted, or the topic's retention removed them.
        """
        heard_at = time.monotonic()
        while stop is None or not stop.is_set():
            found = self._poll()
            for record in found:
                heard_at = time.monotonic()
                moved = self._take(record)
                if moved is not None:
                    yield moved
            if not found and idle_s is not None and time.monotonic() - heard_at > idle_s:
                return

    def _poll(self) -> list[Record]:
        if self._follower is None:
            self._check_topics()
            starts = {
                (self._names.derived(self._name, version), part): offset
                for part, (version, offset) in self._places.items()
            }
            client = f"everstate-read-{self._name}"
            self._follower = Follower(self._config, starts, client_id=client)
        return self._follower.poll(_RECORDS_MAX, _POLL_S)

    def _take(self, record: Record) -> DerivedRecord | None:
        version, offset = self._places[record.partition]
        topic = self._names.derived(self._name, version)
        if record.topic != topic or record.offset < offset:
            return (
                None  # it was fetched before a barrier moved the reader to the next version's topic
            )
        headers = dict(record.headers)
        if BARRIER in headers:
            barrier = msgspec.json.decode(record.value or b"", type=Barrier)
            self._places[record.partition] = (barrier.version, barrier.offset)
            self.close()
            return None
        self._places[record.partition] = (version, record.offset + 1)
        found = _decoded(record, headers, version, self.token)
        if self._seen is not None and found.key is not None:
            if found.version <= self._seen.get(found.key, 0):
                return None
            self._seen[found.key] = found.version
        return found

    def _first(self, start: Start) -> dict[int, tuple[int, int]]:
        """Version and offset to start at in each partition, in the published version."""
        progress = read_progress(self._config, f"derive-{self._name}")
        note = None if progress is None else DerivedNote.read(progress.note)
        if note is None or note.published is None:
            raise NotFound(
                f"derived topic {self._name} is not published yet.",
                advice="`everstate views list` shows its state; `everstate run` publishes it.",
            )
        topic = self._names.derived(self._name, note.published)
        with Offsets(self._config) as offsets:
            ask = offsets.beginnings if start == "beginning" else offsets.stable_ends
            return {part: (note.published, at) for (_, part), at in ask([topic]).items()}

    def _read_token(self, token: str) -> dict[int, tuple[int, int]]:
        try:
            name, places = msgspec.json.decode(token, type=tuple[str, dict[int, tuple[int, int]]])
        except msgspec.DecodeError as cause:
            raise InvalidQuery(f"{token!r} is not a token of a derived topic.") from cause
        if name != self._name:
            raise InvalidQuery(
                f"this token belongs to the derived topic {name}, not to {self._name}."
            )
        return places

    def _check_topics(self) -> None:
        wanted = {self._names.derived(self._name, version) for version, _ in self._places.values()}
        with Topics(self._config) as topics:
            gone = sorted(wanted - topics.existing())
        if gone:
            raise DataLoss(
                f"{', '.join(gone)} was deleted, because its version was replaced too long ago. No "
                "record was skipped.",
                advice='Read the current version: start="beginning".',
            )


def forget_topic(config: Config, name: str) -> list[str]:
    """Delete all versions of a derived topic that is no longer declared, and its progress note."""
    with OncePublisher(config, f"derive-{name}") as publisher:
        progress = publisher.open()
        if progress is not None:
            publisher.publish(progress.batch + 1, [], DerivedNote().written)
    prefix = TopicNames(config.log.prefix).derived_prefix(name)
    with Topics(config) as topics:
        gone = [each for each in topics.existing() if each.startswith(prefix)]
        topics.delete(each for each in gone if each.removeprefix(prefix).isdecimal())
    return gone


def _decoded(
    record: Record, headers: Mapping[str, bytes | None], version: int, token: str
) -> DerivedRecord:
    def header_text(name: str) -> str:
        return (headers.get(name) or b"").decode()

    return DerivedRecord(
        key=None if record.key is None else record.key.decode(),
        value=msgspec.json.decode(record.value or b"null"),
        version=int(header_text(VERSION)),
        id=header_text("ce_id"),
        kind=header_text(KIND),
        provenance=msgspec.json.decode(header_text(PROVENANCE) or "{}"),
        changed_at=(record.partition, int(header_text(OFFSET))),
        topic_version=version,
        token=token,
    )
