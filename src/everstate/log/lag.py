"""How far a reader is behind the log, in changes and in seconds."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from everstate.closing import Closing
from everstate.config import Config
from everstate.errors import DataLoss
from everstate.log.client import ADMIN_TIMEOUT_S
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets

_REACH_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class ReaderPosition:
    """The next offset that a reader, such as a view, will read of one partition."""

    reader: str
    topic: str
    partition: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class LagRow:
    """Lag of one reader on one partition at one moment.

    ``lag_changes`` counts offsets up to the last stable one, including transaction markers, and is
    0 when only markers are left. ``lag_seconds`` is the age of the oldest unread record, by its
    timestamp; 0 when there is none.
    """

    topic: str
    partition: int
    reader: str
    position: int
    end: int
    lag_changes: int
    lag_seconds: float


def is_reachable(config: Config) -> bool:
    """Whether a broker accepts connections: a quick check before requests with a long time-out.

    False too when no address is known, for example of a local broker that is not running.
    """
    for address in (config.log.bootstrap_servers or "").split(","):
        host, _, port = address.strip().rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S):
                return True
        except (OSError, ValueError):
            continue
    return False


class Lag(Closing):
    """Measures lag repeatedly over one pair of connections; close it.

    Cost: one request, and one small fetch for each distinct position that lags. A log that does
    not answer is waited for as long as by :class:`Offsets`.
    """

    def __init__(self, config: Config) -> None:
        self._offsets = Offsets(config)
        self._consumer = Consumer(
            config, client_id="everstate-lag", timeout_s=ADMIN_TIMEOUT_S, read_ahead=False
        )

    def close(self) -> None:
        """Close the connections."""
        self._offsets.close()
        self._consumer.close()

    def rows(self, positions: Iterable[ReaderPosition]) -> list[LagRow]:
        """One row for each position, in their order.

        For a position that the log no longer holds, the lag counts from the log's first offset.
        Raises Unavailable, and LogError for an unknown topic.
        """
        listed = list(positions)
        ends = self._offsets.stable_ends({position.topic for position in listed})
        oldest: dict[tuple[str, int, int], int | None] = {}
        rows = []
        for position in listed:
            end = ends[position.topic, position.partition]
            place = (position.topic, position.partition, position.next_offset)
            if position.next_offset < end and place not in oldest:
                oldest[place] = self._first_timestamp_ms(*place, end)
            unread_since_ms = oldest.get(place)
            changes = 0 if unread_since_ms is None else end - position.next_offset
            seconds = 0.0 if unread_since_ms is None else time.time() - unread_since_ms / 1000
            rows.append(
                LagRow(
                    position.topic,
                    position.partition,
                    position.reader,
                    position.next_offset,
                    end,
                    changes,
                    max(0.0, seconds),
                )
            )
        return rows

    def _first_timestamp_ms(self, topic: str, partition: int, start: int, end: int) -> int | None:
        try:
            for record in self._consumer.read(topic, partition, start, end):
                return record.timestamp_ms
        except DataLoss:
            begin = self._offsets.beginnings([topic])[topic, partition]
            for record in self._consumer.read(topic, partition, begin, end):
                return record.timestamp_ms
        return None
