"""Follows the accepted changes of several entity types as one stream, in the order of recording."""

from __future__ import annotations

import heapq
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Final, TypeAlias

from everstate.changes.tokens import LogPosition, Token
from everstate.closing import Closing
from everstate.config import Config
from everstate.errors import InvalidQuery
from everstate.serving.changes import Changes, Delivery, Since
from everstate.views.project import Project
from everstate.views.source import GENERATION

_WAIT_S: Final = 0.02
_Place: TypeAlias = tuple[str, int]
"""An entity type and a partition."""


class MergedChanges(Closing):
    """Iterates over accepted changes of several entity types, with one token for all of them.

    A key's changes have the order of their versions. All others come by the time at which the log
    has them: exactly, as far as they were accepted before the stream began, and as they arrive
    afterwards. What the log no longer has comes first, from the archives, one entity type after
    the other. Otherwise as :class:`~everstate.serving.changes.Changes`, which has the errors;
    raises InvalidQuery without an entity type.
    """

    def __init__(
        self,
        config: Config,
        project: Project,
        entities: Sequence[str],
        *,
        since: Since,
        until: Since | None = None,
        raw: bool = False,
    ) -> None:
        if not entities:
            raise InvalidQuery(
                "no entity type is named.", advice='Name some: app.changes(["guest", "order"], …).'
            )
        self._stopped, self._streams = threading.Event(), dict[str, Changes]()
        with ExitStack() as unfinished:
            for entity in dict.fromkeys(entities):
                made = Changes(config, project, entity, since=since, until=until, raw=raw)
                self._streams[entity] = unfinished.enter_context(made)
            self._spots = {name: stream.spots for name, stream in self._streams.items()}
            self._present = {name: stream.present() for name, stream in self._streams.items()}
            unfinished.pop_all()

    def close(self) -> None:
        """End the iteration; a waiting one ends within a second."""
        self._stopped.set()
        for stream in self._streams.values():
            stream.close()

    @property
    def token(self) -> str:
        """The position of the stream: after the change that it delivered last."""
        return str(Token({name: self._position(name) for name in self._streams}))

    def __iter__(self) -> Iterator[Delivery]:
        with ExitStack() as opened:
            for stream in self._streams.values():
                opened.enter_context(stream.reading())
            for delivery in self._merged():
                yield self._delivered(delivery)
                if self._stopped.is_set():
                    return

    def _merged(self) -> Iterator[Delivery]:
        for stream in self._streams.values():
            while stream.reads_archive and not self._stopped.is_set():
                yield from stream.read(0.0, stream.unfinished())
        read, is_idle = defaultdict[_Place, deque[Delivery]](deque), False
        while not self._stopped.is_set():
            late, is_finished = set[_Place](), True
            for name, stream in self._streams.items():
                open_ones = [(name, number) for number in stream.unfinished()]
                wanted = [n for _, n in open_ones if stream.reads_archive or not read[name, n]]
                for delivery in stream.read(_WAIT_S * is_idle, wanted) if wanted else ():
                    read[name, delivery.partition[1]].append(delivery)
                late |= {place for place in open_ones if self._is_late(*place)}
                is_finished = is_finished and not open_ones
            heads = [(each[0].record.timestamp_ms, place) for place, each in read.items() if each]
            if is_finished and not heads:
                return
            heapq.heapify(heads)
            missing, is_idle = {place for place in late if not read[place]}, True
            while heads and not missing:
                _, place = heapq.heappop(heads)
                yield read[place].popleft()
                is_idle = False
                if read[place]:
                    heapq.heappush(heads, (read[place][0].record.timestamp_ms, place))
                elif place in late:
                    missing.add(place)
            for name, stream in self._streams.items():
                if not any(each for (entity, _), each in read.items() if entity == name):
                    self._spots[name] = stream.spots

    def _is_late(self, name: str, partition: int) -> bool:
        """Whether a partition was not read as far as it was accepted when the stream was made."""
        at = (GENERATION, partition)
        return self._streams[name].spots[at] < self._present[name][at]

    def _delivered(self, delivery: Delivery) -> Delivery:
        """A change with the token of all streams."""
        name = delivery.entity
        self._spots[name] = {**self._spots[name], delivery.partition: delivery.spot}
        others = {each: self._position(each) for each in self._streams if each != name}
        stream = replace(delivery.stream, others=others)
        return replace(delivery, stream=stream, others=self._spots[name])

    def _position(self, name: str) -> LogPosition:
        return LogPosition(self._streams[name].mark, self._spots[name])
