"""What a publisher must find at the ends of its topics when it starts again (C8).

The progress of a publisher is a topic of its own: a broker may lose the newest records of a
changelog and still have the progress. So each batch's progress record says where the changelogs
ended shortly before, and how many records were published to each since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Final

import msgspec

from everstate.config import Config
from everstate.errors import LogTruncated
from everstate.errors.log import BEGIN_NEW_LOG
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.record import OutRecord


class Tail(msgspec.Struct, frozen=True, array_like=True):
    """The end of each partition when it was asked last, and the records published there since."""

    ends: tuple[int, ...]
    sent: int


Tails = Mapping[str, Tail]
"""By topic."""

encode_tails: Final = msgspec.json.Encoder().encode
decode_tails: Final = msgspec.json.Decoder(dict[str, Tail]).decode


def tails_with(
    offsets: Offsets, records: Sequence[OutRecord], topics: Iterable[str], recent: Tails
) -> dict[str, Tail]:
    """The tails with a batch that is sent next, of those of ``topics`` that it has records in.

    ``recent``: tails that the batch is counted with. Cost: a round trip to the broker, about
    1.5 ms, if the batch has records in a topic that is not among them.
    """
    watched = frozenset(topics)
    sent = Counter(record.topic for record in records if record.topic in watched)
    found = offsets.high_watermarks(sent.keys() - recent.keys())
    ends = {topic: tail.ends for topic, tail in recent.items()} | {
        topic: tuple(end for (name, _), end in sorted(found.items()) if name == topic)
        for topic in sent.keys() - recent.keys()
    }
    before = {topic: tail.sent for topic, tail in recent.items()}
    return {topic: Tail(ends[topic], before.get(topic, 0) + sent[topic]) for topic in sent}


def check_tails(config: Config, who: str, tails: Tails, *, advice: str = BEGIN_NEW_LOG) -> None:
    """Raise LogTruncated when a topic lacks records that it had, by its tail.

    ``who`` is the subject of the message. Cost: the records since each tail's ends are read again.
    """
    lost = _lost(config, tails) if tails else ()
    if lost:
        raise LogTruncated(
            f"{who}: the log has lost records that were published: {'; '.join(lost)}. Nothing was "
            "published.",
            advice=advice,
        )


def _lost(config: Config, tails: Tails) -> list[str]:
    lost = list[str]()
    with Offsets(config) as offsets, Consumer(config, client_id="everstate-tails") as consumer:
        first, high = offsets.beginnings(tails), offsets.high_watermarks(tails)
        stable = offsets.stable_ends(tails)
        for topic, tail in tails.items():
            ends = {(topic, partition): end for partition, end in enumerate(tail.ends)}
            short = [
                f"{topic}[{place[1]}] ends at {high[place]:,}, and ended at {end:,} before"
                for place, end in ends.items()
                if high[place] < end
            ]
            lost += short
            # With an open transaction, or when old records were deleted, nothing can be counted.
            is_whole = all(
                first[each] <= ends[each] and stable[each] == high[each] for each in ends
            )
            if short or not is_whole:
                continue
            found = 0
            for place, end in ends.items():
                with closing(consumer.read(*place, end, stable[place])) as records:
                    found += sum(1 for _ in islice(records, tail.sent - found))
            if found < tail.sent:
                lost.append(f"{topic} has {found:,} of the newest {tail.sent:,} records")
    return lost
