"""What the log has of a topic beside stored positions, so that a proof names what it did not read.

Readers refuse such a log (:meth:`Topics.check_identity`, :func:`check_ends`); a proof goes on with
what it can read, and tells the rest.
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
    """Where the partitions of stored positions begin and end now, and what lies outside of them."""

    begins: Mapping[int, int] = field(default_factory=dict)
    """First offset of each partition; none when the log is not the one of the positions."""
    ends: Mapping[int, int] = field(default_factory=dict)
    """Stable end of each partition."""
    gone: str | None = None
    """Why nothing of this log can be read; ``None``: it can."""
    unread: tuple[str, ...] = ()
    """Records of the log that no position reaches, or that positions reach and the log lost."""


def log_extent(
    config: Config, topic: str, stored: TopicIdentity, position: Mapping[int, int]
) -> LogExtent:
    """Look at a topic whose positions are known; raises Unavailable."""
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
            unread.append(f"{topic}[{partition}] was added later, and has {count:,} offsets")
        elif end < position[partition]:
            unread.append(
                f"{topic}[{partition}] ends at {end:,}: offsets {end:,} to "
                f"{position[partition] - 1:,} are gone from the log"
            )
    return LogExtent(begins, ends, None, tuple(unread))
