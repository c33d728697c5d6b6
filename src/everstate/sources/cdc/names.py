"""The names that a capture uses in the database, in Kafka Connect and in the log."""

from __future__ import annotations

import hashlib
import re
import zlib
from dataclasses import dataclass

from everstate.log.topics import TopicNames

_IDENTIFIER_MAX = 44
"""With its prefixes every name then fits in PostgreSQL's limit of 63 bytes."""


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
        """Name of the slot and the publication; part of the names of our tables."""
        name = re.sub(r"[^a-z0-9_]", "_", f"{self.prefix}_{self.source}".lower())
        if len(name) <= _IDENTIFIER_MAX:
            return name
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        return f"{name[: _IDENTIFIER_MAX - 9]}_{digest}"

    @property
    def server_id(self) -> int:
        """The connector's ``server_id`` as a replica of the database, above the usual numbers."""
        return 1_000_000_000 + zlib.crc32(self.connector.encode()) % 1_000_000_000

    @property
    def raw_log(self) -> str:
        """The one raw topic, with everything that the connector writes, in its order.

        Debezium puts it before the names of topics of its own, which the transforms replace.
        """
        return TopicNames(self.prefix).raw_prefix(self.source)

    @property
    def notifications(self) -> str:
        """Topic in which the connector reports the progress of its snapshots."""
        return TopicNames(self.prefix).capture(self.source, "notifications")

    @property
    def schema_history(self) -> str:
        """Topic in which a connector of a binlog stores the history of table definitions."""
        return TopicNames(self.prefix).capture(self.source, "schemas")

    @property
    def heartbeat_prefix(self) -> str:
        """What Debezium puts before the topic prefix for its heartbeats."""
        return f"{self.prefix}.capture.heartbeats"
