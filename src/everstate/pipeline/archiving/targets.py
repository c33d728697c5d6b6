"""The topic that a replay writes to: never one of the project's own."""

from __future__ import annotations

import re
from contextlib import closing
from typing import Final

from everstate.config import Config
from everstate.errors import LogError
from everstate.log.client import changelog_bytes_max
from everstate.log.positions import Offsets
from everstate.log.topics import Topics

_OWN: Final = (
    r"[^.]+\.[a-z]+\.g[0-9]+|[^.]+\.(dead|partials)|(raw|derived|process|capture)\..+|dead|progress"
)
"""Names of the topics that everstate writes, after the prefix; see TopicNames."""


def prepare(config: Config, topic: str, partitions: int, *, append: bool = False) -> int:
    """Create the topic without a retention limit, or check it; returns its number of partitions.

    Raises LogError for a topic of the project's own, because its readers would take the records for
    new ones; for a topic that has records already, unless ``append``; and for one in which Kafka
    replaces the timestamps of records.
    """
    if re.fullmatch(rf"{re.escape(config.log.prefix)}\.({_OWN})", topic):
        raise LogError(
            f"topic {topic} is one of the project's own; nothing was written.",
            advice="Name another topic; to begin a new log, one of a new `log.prefix`.",
        )
    with Topics(config) as topics, closing(Offsets(config)) as offsets:
        if topic not in topics.existing():
            size = str(changelog_bytes_max(config))
            topics.create(topic, partitions, {"retention.ms": "-1", "max.message.bytes": size})
            return partitions
        if topics.config(topic)["message.timestamp.type"] != "CreateTime":
            raise LogError(
                f"topic {topic} gives records the time of writing (message.timestamp.type), so "
                "they would not be the same; nothing was written.",
                advice="Name a topic that does not exist yet.",
            )
        if not append and any(end > 0 for end in offsets.high_watermarks([topic]).values()):
            raise LogError(
                f"topic {topic} is not empty; nothing was written.",
                advice="Name a topic that does not exist yet, or delete this one first: an "
                "interrupted replay begins again. --append adds the records to those that are "
                "there, also where they are the same.",
            )
        return topics.partitions(topic)
