"""Compares a topic with stored positions, so that a proof can name the records it did not read.

Readers reject a log that does not match their positions (:meth:`Topics.check_identity`,
:func:`check_ends`); a proof reads what it can, and reports the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstate.config import Config
from everstate.errors import LogError, LogIdentityChanged, TopicResized
from everstate.log.positions import Offsets
from everstate.log.topics import TopicIdentity, Topics, check_same_topic


@dataclass(frozen=True, slots=True)
class LogExtent:
    """Where the partitions begin and end now, and which records the positions do not match."""

    begins: Mapping[int, int] = field(default_factory=dict)
    """First offset of each partition; empty when the positions belong to another log."""
    ends: Mapping[int, int] = field(default_factory=dict)
    """Stable end of each partition."""
    gone: str | None = None
    """Why this log cannot be read at all; ``None``: it can."""
    unread: tuple[str, ...] = ()
    """Messages on partitions without a position, and on records that the log has lost."""


def log_extent(
    config: Config, topic: str, stored: TopicIdentity, position: Mapping[int, int]
) -> LogExtent:
    """Compare a topic with its stored positions; raises Unavailable."""
    with Topics(config) as topics, Offsets(config) as offsets:
        try:
            check_same_topic(topic, stored, topics.identity(topic))
        except TopicResized:
            pass
        except (LogError, LogIdentityChanged) as error:
            return LogExtent(gone=error.message)
        begins = {p: at for (_, p), at in offsets.beginnings([topic]).items()}
        ends = {p: at for (_, p), at in offsets.stable_ends([topic]).items()}
    unread = []
    for partition, end in sorted(ends.items()):
        if partition not in position:
            count = end - begins[partition]
            unread.append(
                f"{topic}[{partition}] was added after the last read, and its {count:,} offsets "
                "were not read"
            )
        elif end < position[partition]:
            unread.append(
                f"{topic}[{partition}] ends at {end:,}: the log has lost offsets {end:,} to "
                f"{position[partition] - 1:,}"
            )
    return LogExtent(begins, ends, None, tuple(unread))
