"""State at the reader: the present entities of one type in the memory of a process.

The compacted topic `.state` has the newest change of every entity; after it, `.changes` is
followed. A publisher writes a change to both in one transaction (C2), so the changes from the ends
on that `.changes` had before `.state` was read complete the table, and the higher version wins.
The form is that of a global table of Kafka Streams, with versions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec
from msgspec import DecodeError
from pydantic import BaseModel

from everstate.changes import EntityType
from everstate.changes.codec import WireChange, decode_wire
from everstate.changes.tokens import LogPosition, Spot, Token, parse_token
from everstate.closing import Closing
from everstate.config import Config
from everstate.errors import InvalidToken, NotCaughtUp, Unavailable
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.topics import TopicNames
from everstate.serving.places import check_log
from everstate.views.source import GENERATION, RecordSource

_IDLE_S: Final = 0.5
_SETTLE_S: Final = 60.0
"""A transaction of a publisher is ended within this time, by the broker if it was killed."""
_BEGIN_AGAIN: Final = "Make the table again: it is read from the log at each start."


class _Newest(msgspec.Struct, rename="camel", gc=False):
    """What a table keeps of a record of `.state`, which only publishers write."""

    key: str
    version: int
    current_entity_state: msgspec.Raw


_newest: Final = msgspec.json.Decoder(_Newest).decode


class EntityTable(Mapping[str, BaseModel], Closing):
    """Key → present entity, as of :attr:`token`; it follows the log in a thread.

    Threads may share it. An entity is made from its JSON when it is asked for. It needs Kafka and
    nothing else: it has what is written, without the core's judgement, so that a change which waits
    for a missing version is in it at once. When it cannot follow any more (DataLoss,
    LogTruncated), every call raises that error; while Kafka does not answer, it stays as it is.
    Cost: some 0.2 kB of memory beside the JSON of each entity.
    """

    def __init__(self, config: Config, project: str, entity_type: EntityType) -> None:
        """Read the state of all entities; raises LogError without a topic, Unavailable."""
        self._project, self._type = project, entity_type
        self._rows: dict[str, tuple[int, bytes | None]] = {}
        """Key → version and state; None: it is deleted."""
        self._count = 0
        self._moved = threading.Condition()
        self._stopped = False
        self._failure: Exception | None = None
        self._source = RecordSource(config, entity_type.name, advice=_BEGIN_AGAIN)
        try:
            self._at = self._source.ends()
            topic = TopicNames(config.log.prefix).state(entity_type.name)
            with Offsets(config) as offsets:
                # A commit reaches one partition after the other.
                offsets.settle(topic, _SETTLE_S)
            with Consumer(config, client_id="everstate-table", has_headers=False) as consumer:
                for record in consumer.read_topic(topic):
                    self._take(_newest, record.value)
            self._source.begin(self._at, {})
        except BaseException:
            self._source.close()
            raise
        name = f"everstate-table-{entity_type.name}"
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop to follow the log; what was read stays readable."""
        self._stopped = True
        self._thread.join()

    def __getitem__(self, key: str) -> BaseModel:
        """The entity with a key; raises KeyError."""
        self._check()
        _, state = self._rows[key]
        if state is None:
            raise KeyError(key)
        return self._type.validate_json(state)

    def __iter__(self) -> Iterator[str]:
        """The keys of all present entities at the moment of the call, in no order."""
        self._check()
        return iter([key for key, (_, state) in list(self._rows.items()) if state is not None])

    def __len__(self) -> int:
        self._check()
        return self._count

    def __contains__(self, key: object) -> bool:
        self._check()
        return self._rows.get(str(key), (0, None))[1] is not None

    def version(self, key: str) -> int:
        """The newest version of an entity, also of a deleted one; 0: there was none."""
        self._check()
        return self._rows.get(key, (0, None))[0]

    @property
    def token(self) -> str:
        """The position in the log up to which it has all changes."""
        spots = {(GENERATION, partition): Spot(at) for partition, at in self._at.items()}
        return str(Token({self._type.name: LogPosition(self._source.mark, spots)}))

    def wait_for(self, token: str, wait_s: float = 10.0) -> None:
        """Wait until it has all that a token covers of its entity type.

        Raises InvalidToken, and NotCaughtUp after ``wait_s``.
        """
        parsed, entity = parse_token(token), self._type.name
        if parsed.claims and parsed.project != self._project:
            raise InvalidToken(f"it is of project {parsed.project!r}, not {self._project!r}")
        position = parsed.positions.get(entity)
        if position is not None:
            check_log(entity, position, self._source.mark)

        def missing() -> str | None:
            self._check()
            for (_, partition), spot in position.spots.items() if position else ():
                if self._at[partition] < spot.covered_by:
                    at = f"{self._at[partition]:,}, and {spot.covered_by:,} is awaited"
                    return f"in partition {partition} it is at {at}"
            for claim in parsed.claims:
                if claim.entity == entity and self.version(claim.key) < claim.version:
                    return f"{entity} {claim.key!r} version {claim.version} is not in the log yet"
            return None

        with self._moved:
            if not self._moved.wait_for(lambda: missing() is None, wait_s):
                lacking, advice = missing() or "it came later", "Wait longer."
                raise NotCaughtUp(f"the table of {entity}", lacking, wait_s, advice=advice)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _take(self, read: Callable[[bytes], WireChange | _Newest], value: bytes | None) -> None:
        try:
            change = read(value or b"")
        except DecodeError:
            return  # `Changes` does not deliver what is no change, either
        known, before = self._rows.get(change.key, (0, None))
        if change.version <= known:
            return
        state = bytes(change.current_entity_state)
        after = None if state == b"null" else state
        self._rows[change.key] = change.version, after
        self._count += (after is not None) - (before is not None)

    def _follow(self) -> None:
        try:
            while not self._stopped:
                try:
                    runs = self._source.poll(_IDLE_S, self._source.partitions)
                except Unavailable:
                    continue
                with self._moved:
                    for run in runs:
                        for record in run.records:
                            self._take(decode_wire, record.value)
                        self._at[run.partition] = run.end
                    self._moved.notify_all()
        except Exception as failure:  # whoever reads the table must know
            with self._moved:
                self._failure = failure
                self._moved.notify_all()
        finally:
            self._source.close()
