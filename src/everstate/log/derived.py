"""Derived topics as their readers and their publisher see them: the public name, and barriers.

A derived topic has a physical topic for each version. Its public name refers to the published
version. When another version replaces it, each partition of the old topic ends with a barrier: a
record with the next version and the offset in its topic from which to resume. A version that is
published again has the barriers at which it ended before, which no longer count.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from everstate.changes.derived import BARRIER, KIND, OFFSET, PROVENANCE, VERSION
from everstate.changes.json_numbers import decode
from everstate.changes.tokens import log_mark
from everstate.closing import Closing
from everstate.config import Config
from everstate.errors import DataLoss, InvalidToken, NotFound
from everstate.log.consumer import Follower
from everstate.log.positions import Offsets
from everstate.log.publisher import OncePublisher, read_progress
from everstate.log.record import OutRecord, Record
from everstate.log.topics import TopicIdentity, TopicNames, Topics

Start = Literal["beginning", "now"]
_RECORDS_MAX: Final = 10_000
_POLL_S: Final = 0.2
_SEEN_MAX: Final = 100_000
"""Records that a reader of a raw topic remembers, some 30 MB."""
_BEGIN: Final = 'Begin again without a token: start="beginning", or start="now".'


class Barrier(msgspec.Struct, frozen=True):
    """The last record of a partition of a version that was replaced."""

    next: str
    version: int
    offset: int
    changes_from: int = 0
    """Raw: the next topic repeats changes; those below this offset of the changelog are known."""
    turn: int | None = None
    """Increases with each replacement; ``None``: written before barriers had it."""


def barriers(
    ended: str, barrier: Barrier, starts: Mapping[int, int], known: Mapping[int, int] | None = None
) -> list[OutRecord]:
    """The barriers of all partitions of a topic that ends.

    ``barrier``: what they have in common. ``starts``: by partition, the offset to resume at in the
    next topic; ``known``: the position of the changelog that the ended topic has completely.
    """
    return [
        OutRecord(
            ended,
            None,
            msgspec.json.encode(
                replace(barrier, offset=start, changes_from=(known or {}).get(partition, 0))
            ),
            [(BARRIER, str(barrier.version).encode())],
            partition,
        )
        for partition, start in starts.items()
    ]


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
        # The encoder sorts only texts, and versions and partitions are numbers.
        return msgspec.json.encode(msgspec.to_builtins(self, str_keys=True, order="deterministic"))

    def copied(self) -> DerivedNote:
        """A copy that may be changed."""
        return self.read(self.written)

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


_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Version: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a reader is in one partition."""

    version: _Version
    offset: _Count
    changes_from: _Count = 0
    turn: _Count = 0
    """Barriers that have no higher turn are older than the way that led here."""


class _Token(msgspec.Struct, frozen=True, array_like=True):
    name: str
    places: dict[_Count, _Place]
    logs: dict[_Version, str] = {}
    """The mark of each version's topic: one that is deleted and made again has another."""


class DerivedReader(Closing):
    """Reads a derived topic by its public name, from one version to the next; one thread.

    Each record of an accepted topic is returned once. A raw topic may have a version of a key
    twice, and a lower one after a higher one. The reader skips a version of a key that is among the
    last 100,000 that it returned; a token does not hold them.
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
        """``token``: resume after the record that it came with. Raises NotFound, InvalidToken."""
        self._config, self._name = config, name
        self._names = TopicNames(config.log.prefix)
        self._seen: OrderedDict[tuple[str, int], None] | None = OrderedDict() if is_raw else None
        self._logs: dict[int, str] = {}
        self._places = self._first(start) if token is None else self._read_token(token)
        self._follower: Follower | None = None
        self._ready: deque[Record] = deque()
        """Fetched, and not returned yet."""

    def close(self) -> None:
        """Close the connection."""
        self._unfollow()
        self._ready.clear()

    def _unfollow(self) -> None:
        if self._follower is not None:
            self._follower.close()
            self._follower = None

    @property
    def token(self) -> str:
        """Token to resume after the records returned so far; valid for this topic only."""
        return self._token(self._places)

    def _token(self, places: dict[int, _Place]) -> str:
        logs = {place.version: self._logs[place.version] for place in places.values()}
        return msgspec.json.encode(_Token(self._name, places, logs)).decode()

    def records(
        self, *, idle_s: float | None = None, stop: threading.Event | None = None
    ) -> Generator[DerivedRecord, None, None]:
        """Records as they are appended; ends after ``idle_s`` without one, or when ``stop`` is set.

        A loop that was left loses nothing: the next one continues behind the last record that was
        returned. Raises DataLoss when the next records are gone: their version was replaced long
        ago and its topic deleted, or the topic's retention removed them. Raises InvalidToken when
        the topic is another one with the same name.
        """
        heard_at = time.monotonic()
        while stop is None or not stop.is_set():
            if not self._ready:
                if self._follower is None:
                    self._follower = self._following()
                    heard_at = time.monotonic()  # connecting is not idling
                self._ready.extend(self._poll(self._follower))
            if self._ready:
                taken = self._take(self._ready[0])
                self._ready.popleft()
                if taken is not None:
                    yield taken
                heard_at = time.monotonic()
            elif idle_s is not None and time.monotonic() - heard_at > idle_s:
                return

    def _following(self) -> Follower:
        self._check_topics()
        starts = {
            (self._names.derived(self._name, place.version), part): place.offset
            for part, place in self._places.items()
        }
        return Follower(self._config, starts, client_id=f"everstate-read-{self._name}")

    def _poll(self, follower: Follower) -> list[Record]:
        try:
            return follower.poll(_RECORDS_MAX, _POLL_S)
        except BaseException:
            # It may have fetched records that it did not return.
            self._unfollow()
            raise

    def _take(self, record: Record) -> DerivedRecord | None:
        """Move behind a record; ``None``: it is not to be returned."""
        place = self._places[record.partition]
        topic = self._names.derived(self._name, place.version)
        if record.topic != topic or record.offset < place.offset:
            # It was fetched before a barrier moved the reader to the next version's topic.
            return None
        headers = dict(record.headers)
        after = replace(place, offset=record.offset + 1)
        if BARRIER in headers:
            barrier = msgspec.json.decode(record.value or b"", type=Barrier)
            if barrier.turn is None or barrier.turn > place.turn:
                after = self._next(barrier, place)
            self._places = {**self._places, record.partition: after}
            return None
        places = {**self._places, record.partition: after}
        found = _decoded(record, headers, place.version, self._token(places))
        self._places = places
        is_known = found.changed_at[1] < place.changes_from or self._has_seen(found)
        return None if is_known else found

    def _next(self, barrier: Barrier, place: _Place) -> _Place:
        """The place that a barrier leads to."""
        self._learn(barrier.version)
        self._unfollow()
        turn = place.turn if barrier.turn is None else barrier.turn
        return _Place(barrier.version, barrier.offset, barrier.changes_from, turn)

    def _has_seen(self, found: DerivedRecord) -> bool:
        """Whether a record of a raw topic repeats one that is remembered; remembers it."""
        if self._seen is None or found.key is None:
            return False
        this = (found.key, found.version)
        is_repeated = this in self._seen
        self._seen[this] = None
        self._seen.move_to_end(this)
        if len(self._seen) > _SEEN_MAX:
            self._seen.popitem(last=False)
        return is_repeated

    def _first(self, start: Start) -> dict[int, _Place]:
        """The place to start at in each partition, in the published version."""
        progress = read_progress(self._config, f"derive-{self._name}")
        note = None if progress is None else DerivedNote.read(progress.note)
        if progress is None or note is None or note.published is None:
            raise NotFound(
                f"derived topic {self._name} is not published yet.",
                advice="`everstate views list` shows its state; `everstate run` publishes it.",
            )
        version = note.published
        self._learn(version)
        with Offsets(self._config) as offsets:
            ask = offsets.beginnings if start == "beginning" else offsets.stable_ends
            found = ask([self._names.derived(self._name, version)])
        # The version has barriers of this turn or an earlier one if it was replaced, and undone.
        return {part: _Place(version, at, 0, progress.batch) for (_, part), at in found.items()}

    def _read_token(self, token: str) -> dict[int, _Place]:
        try:
            found = msgspec.json.decode(token, type=_Token)
        except msgspec.DecodeError as cause:
            raise InvalidToken(f"{token!r} is no token of a derived topic") from cause
        if found.name != self._name:
            raise InvalidToken(f"it belongs to the derived topic {found.name}, not {self._name}")
        if not found.logs.keys() >= {place.version for place in found.places.values()}:
            raise InvalidToken(
                "it does not name its log, so it may be of one that was begun anew: an earlier "
                "release of everstate made it",
                advice=_BEGIN,
            )
        self._logs = found.logs
        return found.places

    def _check_topics(self) -> None:
        """Raise unless the topics are those that the places belong to (C8)."""
        found = self._identities({place.version for place in self._places.values()})
        for version, identity in found.items():
            if self._mark(version, identity) != self._logs[version]:
                raise InvalidToken(
                    f"its positions of {self._name} are of another log: another project, or one "
                    "that was begun anew",
                    advice=_BEGIN,
                )
            if self._places.keys() != set(range(identity.partitions)):
                raise InvalidToken(
                    f"it has other partitions than {self._name}, which has {identity.partitions}",
                    advice=_BEGIN,
                )

    def _learn(self, version: int) -> None:
        """Remember the mark of the topic of a version, if it is not known."""
        if version not in self._logs:
            (identity,) = self._identities({version}).values()
            self._logs = {**self._logs, version: self._mark(version, identity)}

    def _mark(self, version: int, identity: TopicIdentity) -> str:
        topic = self._names.derived(self._name, version)
        return log_mark(topic, identity.cluster_id, identity.topic_id).hex()

    def _identities(self, versions: Collection[int]) -> dict[int, TopicIdentity]:
        """The identity of each version's topic; raises DataLoss when one is gone."""
        names = {version: self._names.derived(self._name, version) for version in versions}
        with Topics(self._config) as topics:
            gone = sorted(set(names.values()) - topics.existing())
            if gone:
                raise DataLoss(
                    f"{', '.join(gone)} was deleted, because its version was replaced too long "
                    "ago. No record was skipped.",
                    advice='Read the current version: start="beginning".',
                )
            found = topics.identities(list(names.values()))
        return {version: found[topic] for version, topic in names.items()}


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
        value=decode(record.value or b"null"),
        version=int(header_text(VERSION)),
        id=header_text("ce_id"),
        kind=header_text(KIND),
        provenance=decode(header_text(PROVENANCE) or "{}"),
        changed_at=(record.partition, int(header_text(OFFSET))),
        topic_version=version,
        token=token,
    )
