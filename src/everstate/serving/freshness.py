"""How far positions are behind the log, for many readers of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from everstate.changes.tokens import LogPosition
from everstate.closing import Closing
from everstate.config import Config
from everstate.errors import LogError, Unavailable
from everstate.log.lag import Lag, ReaderPosition, is_reachable
from everstate.log.topics import TopicNames

_AGAIN_S: Final = 5.0
"""A log that did not answer is not asked for so long: readers of views do not need it."""


@dataclass(frozen=True, slots=True)
class Behind:
    """How far a position is behind the log."""

    changes: int
    seconds: float
    """Age of the oldest change after the position; 0 when there is none."""


class Freshness(Closing):
    """Measures lag over one pair of connections, which threads share; close it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._names = TopicNames(config.log.prefix)
        self._lock = threading.Lock()
        self._lag: Lag | None = None
        self._asked_again_at = 0.0

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            self._stop()

    def behind(self, position: Mapping[str, LogPosition]) -> Behind | None:
        """How far a position of some entity types is behind; ``None``: the log does not answer.

        Cost: a request to the log, and a small fetch for each partition that lags.
        """
        return self.behind_of(
            (entity, generation, partition, spot[0])
            for entity, place in position.items()
            for (generation, partition), spot in place.spots.items()
        )

    def behind_of(self, places: Iterable[tuple[str, int, int, int]]) -> Behind | None:
        """The same of places: entity type, generation, partition and next offset.

        ``None`` too when the topic of an entity type was removed.
        """
        wanted = [
            ReaderPosition("view", self._names.changes(entity, generation), *place)
            for entity, generation, *place in places
        ]
        with self._lock:
            if time.monotonic() < self._asked_again_at:
                return None
            try:
                if self._lag is None:
                    if not is_reachable(self._config):
                        raise Unavailable("no broker accepts connections.")
                    self._lag = Lag(self._config)
                rows = self._lag.rows(wanted)
            except LogError:
                return None
            except Unavailable:
                self._stop()
                self._asked_again_at = time.monotonic() + _AGAIN_S
                return None
        seconds = max((row.lag_seconds for row in rows), default=0.0)
        return Behind(sum(row.lag_changes for row in rows), seconds)

    def _stop(self) -> None:
        if self._lag is not None:
            self._lag.close()
            self._lag = None
