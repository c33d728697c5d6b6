"""What a capture is called in the database, in Connect and in the log."""

from __future__ import annotations

import hashlib
import re
import zlib
from dataclasses import dataclass

from everstate.log.topics import TopicNames
from everstate.sources.cdc.declaration import Capture, topic_table

_IDENTIFIER_MAX = 44
"""With what is put before it, every name stays within the 63 bytes of a database."""


@dataclass(frozen=True, slots=True)
class CaptureNames:
    """Every name that follows from the log's prefix and the capture's name."""

    prefix: str
    source: str

    @property
    def connector(self) -> str:
        """The connector's name on its Connect cluster."""
        return f"{self.prefix}.{self.source}"

    @property
    def identifier(self) -> str:
        """Slot and publication; part of the names of our tables."""
        name = re.sub(r"[^a-z0-9_]", "_", f"{self.prefix}_{self.source}".lower())
        if len(name) <= _IDENTIFIER_MAX:
            return name
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        return f"{name[: _IDENTIFIER_MAX - 9]}_{digest}"

    @property
    def server_id(self) -> int:
        """Number that the connector has as a replica of MariaDB; unlike those people choose."""
        return 1_000_000_000 + zlib.crc32(self.connector.encode()) % 1_000_000_000

    @property
    def topic_prefix(self) -> str:
        """What the raw topics of this capture begin with."""
        return TopicNames(self.prefix).raw_prefix(self.source)

    @property
    def transactions(self) -> str:
        """Topic of the transactions' beginnings and ends."""
        return TopicNames(self.prefix).raw(self.source, "transaction")

    @property
    def messages(self) -> str:
        """Topic of PostgreSQL's logical messages."""
        return TopicNames(self.prefix).raw(self.source, "message")

    @property
    def notifications(self) -> str:
        """Topic in which the connector tells how its snapshots go."""
        return TopicNames(self.prefix).capture(self.source, "notifications")

    @property
    def schema_history(self) -> str:
        """Topic in which the MariaDB connector remembers the tables' past definitions."""
        return TopicNames(self.prefix).capture(self.source, "schemas")

    @property
    def heartbeat_prefix(self) -> str:
        """What Debezium puts before the topic prefix for its heartbeats."""
        return f"{self.prefix}.capture.heartbeats"

    @property
    def heartbeats(self) -> str:
        """Topic of the heartbeats."""
        return f"{self.heartbeat_prefix}.{self.topic_prefix}"


def names_of(prefix: str, capture: Capture) -> CaptureNames:
    """The names of a declared capture."""
    return CaptureNames(prefix, capture.name)


def table_topics(names: CaptureNames, capture: Capture) -> dict[str, str]:
    """Table as declared → its raw topic."""
    topics = TopicNames(names.prefix)
    return {table: topics.raw(names.source, topic_table(table)) for table in capture.tables}
