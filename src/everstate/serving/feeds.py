"""Feeds: the accepted changes of an entity type as numbered pages that never change.

Each partition of a changelog is one feed, and page *n* of a feed has the changes that take effect
at offsets ``[n * PAGE_OFFSETS, (n + 1) * PAGE_OFFSETS)`` of that partition. Offsets never change,
and neither does the core's verdict about an offset before its position. So a page is closed, and
the same for ever, when the core has passed its last offset. One feed of all partitions would need
an order that is stored somewhere: no offset says which of two partitions was written first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from everstate.changes.tokens import LogPosition, Spot, log_mark
from everstate.closing import Closing
from everstate.config import Config
from everstate.errors import DataLoss, NotFound, PageGone, Unavailable
from everstate.log.positions import Range
from everstate.log.record import Record
from everstate.log.topics import Topics
from everstate.serving.changes import version_of
from everstate.serving.judged import CoreNotes
from everstate.views.in_effect import in_effect
from everstate.views.source import GENERATION, RecordSource

PAGE_OFFSETS: Final = 128
"""Offsets of a page. It is part of what a page's address means, so it can never be changed."""
FEED_NAME: Final = r"^[0-9a-f]{16}-[0-9]{1,4}$"
"""The mark of the log and the partition: a log that was begun anew has other feeds."""
_NAME: Final = re.compile(r"([0-9a-f]{16})-(0|[1-9][0-9]{0,3})")


@dataclass(frozen=True, slots=True)
class FeedPlace:
    """One page of a feed, as far as it can be read now."""

    feed: str
    partition: int
    number: int
    end: int
    """The page has the changes that take effect before this offset."""

    @property
    def start(self) -> int:
        """Its first offset."""
        return self.number * PAGE_OFFSETS

    @property
    def is_closed(self) -> bool:
        """Whether the page has all its changes, and never changes again."""
        return self.end == self.start + PAGE_OFFSETS


class FeedReader(Closing):
    """Reads the feeds of one entity type. Used by one thread at a time; close it."""

    def __init__(self, config: Config, entity: str) -> None:
        self._config, self._entity = config, entity
        self._notes = CoreNotes(config, entity)
        self._source: RecordSource | None = None
        self._topics: Topics | None = None

    def close(self) -> None:
        """Close the connections."""
        if self._source is not None:
            self._source.close()
        if self._topics is not None:
            self._topics.close()
        self._source = self._topics = None

    def heads(self) -> list[FeedPlace]:
        """The open page of each feed, in the order of the partitions.

        Raises NotFound while no changes are kept, Unavailable. Cost: two statements of SQL.
        """
        reached = self._notes.reached()
        return [
            _place(reached, partition, spot.next_offset)
            for (_, partition), spot in sorted(reached.spots.items())
        ]

    def place(self, feed: str, number: int | None) -> FeedPlace:
        """A page of a feed; ``None``: the open one.

        Raises NotFound for a feed or page that there is not, Unavailable. Cost as :meth:`heads`.
        """
        reached = self._notes.reached()
        named = _NAME.fullmatch(feed)
        at = None
        if named is not None and named[1] == reached.log.hex():
            at = reached.spots.get((GENERATION, int(named[2])))
        if named is None or at is None:
            raise NotFound(
                f"{self._entity} has no feed {feed!r}.",
                advice="The list of feeds has those of the present log.",
            )
        head = _place(reached, int(named[2]), at.next_offset)
        if number is None or number == head.number:
            return head
        if number > head.number:
            raise NotFound(f"feed {feed} has no page {number} yet; its last one is {head.number}.")
        end = (number + 1) * PAGE_OFFSETS
        return FeedPlace(feed, head.partition, number, end)

    def read(self, place: FeedPlace) -> Sequence[Record]:
        """The records of a page's accepted changes, in the order in which they take effect.

        Raises PageGone when neither log nor archive has them, Unavailable. Cost: 5 ms from the log;
        for a page that only the archive has, reading the files that may hold its offsets.
        """
        span = Range(place.start, place.end)
        if not len(span):
            return []
        judged = self._notes.judged({place.partition: span})[place.partition]
        source = self._source
        if source is None:
            source = self._source = RecordSource(self._config, self._entity)
        try:
            records = source.between(place.partition, span.start, span.end)
            before = [offset for offset in judged.exceptions.released if offset < span.start]
            records += source.fetch(place.partition, before)
        except DataLoss as cause:
            raise PageGone(place.feed, place.number) from cause
        self._check_log(place, source)
        offsets = [record.offset for record in records]
        since = Spot(span.start)
        found = in_effect(records, offsets, since, span.end, judged.exceptions, version_of)
        return [record for _, record in found]

    def _check_log(self, place: FeedPlace, source: RecordSource) -> None:
        """Raise Unavailable when the records were of another topic than the page's.

        Caches keep a page for ever, so one page of a topic that was deleted and created again
        would be wrong for ever. An id is never used twice: if the topic has it after the reading,
        it had it before.
        """
        if self._topics is None:
            self._topics = Topics(self._config)
        found = self._topics.identity(source.topic)
        if not place.feed.startswith(
            log_mark(source.topic, found.cluster_id, found.topic_id).hex()
        ):
            self.close()
            raise Unavailable(
                f"topic {source.topic} is not the one that the views of {self._entity} are kept "
                "from."
            )


def _place(reached: LogPosition, partition: int, at: int) -> FeedPlace:
    return FeedPlace(f"{reached.log.hex()}-{partition}", partition, at // PAGE_OFFSETS, at)
