"""How large the log is, how fast it grows, and when it fills its disks. The sums are pure."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from everstate.config import Config
from everstate.errors import EverstateError
from everstate.log.disks import LogDisk, log_disks
from everstate.log.positions import Offsets
from everstate.serving.log_state import TopicState

CHANGES_PER_PARTITION: Final = 20_000
"""Changes a second that one task of the pipeline applies from one partition: an estimate, half of
what the bench `keep` measures on two cores with the start of Spark."""
_HOUR_S: Final = 3_600
_DAY_S: Final = 24 * _HOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSize:
    """How large one topic is, and how fast it grows. Bytes are those of all replicas."""

    name: str
    partitions: int
    partitions_needed: int
    """Estimate for the busiest hour; see :data:`CHANGES_PER_PARTITION`."""
    bytes: int | None
    """``None``: not known."""
    changes_per_s: float
    """Of the last day, or since the oldest record; transaction markers count, too."""
    busiest_per_s: float
    """Of the busiest hour."""
    day_bytes: float | None
    """What a day adds, and one more day of retention costs; ``None``: not known, or compacted."""
    holds_s: float
    """Age of its oldest record, to a percent."""
    keeps_s: float | None
    """How long it keeps a record at this rate; ``None``: for ever, or until its key has another."""


@dataclass(frozen=True, slots=True)
class LogSize:
    """The topics that have records, the largest first, and the disks that they are on."""

    topics: Mapping[str, TopicSize]
    disks: Sequence[tuple[LogDisk, float | None]]
    """Each disk, and when these topics fill it at this rate; ``None``: never, or not known."""
    unknown: EverstateError | None
    """Why bytes and disks are not known; ``None``: they are."""


def log_size(config: Config, topics: Iterable[TopicState]) -> LogSize:
    """Measure the topics over the last day, by the times of their records.

    Raises Unavailable. Cost: some 80 requests to the brokers, whatever the number of topics.
    """
    used = {topic.name: topic for topic in topics if topic.offsets}
    unknown, disks, now_s = None, list[LogDisk](), time.time()
    try:
        disks = log_disks(config)
    except EverstateError as error:
        unknown = error
    with Offsets(config) as offsets:
        hours = [int(1000 * (now_s - back * _HOUR_S)) for back in range(24, 0, -1)]
        ends = [*(offsets.at_time(used, at_ms) for at_ms in hours), offsets.stable_ends(used)]
        ages_s = _ages_s(offsets, used, now_s)
    found = list[TopicSize]()
    for name, topic in used.items():
        mine = [[at for (each, _), at in sorted(end.items()) if each == name] for end in ends]
        sizes = [size for disk in disks for size in disk.topics.get(name, ())]
        found.append(topic_size(topic, mine, ages_s[name], sizes))
    found.sort(key=lambda each: (-(each.bytes or 0), each.name))
    by_name = {each.name: each for each in found}
    return LogSize(by_name, [(each, full_in_s(each, by_name)) for each in disks], unknown)


def _ages_s(offsets: Offsets, topics: Collection[str], now_s: float) -> dict[str, float]:
    """Age of the oldest record of each topic: bisected, as a fetch for each would take longer."""
    firsts = offsets.at_time(topics, 0)
    less, most = dict.fromkeys(topics, 1.0), dict.fromkeys(topics, 1e9)
    for _ in range(12):
        tried = {name: math.sqrt(less[name] * most[name]) for name in topics}
        found = offsets.at_times({name: int(1000 * (now_s - tried[name])) for name in topics})
        older = {place[0] for place, at in found.items() if at > firsts[place]}
        for name in topics:
            (less if name in older else most)[name] = tried[name]
    return most


def topic_size(
    topic: TopicState, ends: Sequence[Sequence[int]], holds_s: float, sizes: Sequence[int]
) -> TopicSize:
    """The size of one topic: from the ends of its partitions, and its bytes.

    ``ends``: at each hour of the last day, and now. ``sizes`` are those of all replicas of its
    partitions; empty: they are not known.
    """
    counts = list(map(sum, ends))
    per_s = (counts[-1] - counts[0]) / max(1.0, min(holds_s, _DAY_S))
    busiest = max(per_s, *((after - before) / _HOUR_S for before, after in pairwise(counts)))
    keeps_s, day_bytes = topic.retention_s, None
    if sizes and not topic.is_compacted:
        day_bytes = per_s * _DAY_S * sum(sizes) / topic.offsets
        if topic.retention_bytes is not None and day_bytes:
            # The limit is that of a partition: the busiest one drops records first.
            most = max(after - before for before, after in zip(ends[0], ends[-1], strict=True))
            share = most / max(1, counts[-1] - counts[0])
            replicas = len(sizes) / len(topic.partitions)
            limit_s = topic.retention_bytes * replicas * _DAY_S / (day_bytes * share)
            keeps_s = min(keeps_s or math.inf, limit_s)
    return TopicSize(
        name=topic.name,
        partitions=len(topic.partitions),
        partitions_needed=max(1, math.ceil(busiest / CHANGES_PER_PARTITION)),
        bytes=sum(sizes) if sizes else None,
        changes_per_s=per_s,
        busiest_per_s=busiest,
        day_bytes=day_bytes,
        holds_s=holds_s,
        keeps_s=keeps_s,
    )


def full_in_s(disk: LogDisk, topics: Mapping[str, TopicSize]) -> float | None:
    """When the topics fill a disk: each grows at its rate until it has what it keeps."""
    growing = []
    for name, sizes in disk.topics.items():
        topic = topics.get(name)
        if topic is not None and topic.bytes and topic.day_bytes:
            until_s = (topic.keeps_s or math.inf) - topic.bytes * _DAY_S / topic.day_bytes
            rate = topic.day_bytes / _DAY_S * sum(sizes) / topic.bytes
            growing.append((max(0.0, until_s), rate))
    free, now_s = disk.usable_bytes, 0.0
    growing.sort()
    for at, (until_s, _) in enumerate(growing):
        rate = sum(rate for _, rate in growing[at:])
        if 0 <= free <= rate * (until_s - now_s):
            return now_s + free / rate
        free -= rate * (until_s - now_s)
        now_s = until_s
    return None
