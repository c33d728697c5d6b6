"""The alarm for hanging transactions: an open one holds every reader of its partition back (C5)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Final

from everstate.errors import EverstateError
from everstate.log.positions import Offsets, OpenTransactions

log = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 5.0
_TELL_AGAIN_S: Final = 60.0


class HangingTransactions:
    """Warns of partitions whose stable end stands still below their end for ``alarm_s``.

    The broker aborts such a transaction after its time-out, so waiting mends it; until then
    archive and views of that partition do not move.
    """

    def __init__(self, offsets: Offsets, topics: Sequence[str], *, alarm_s: float = 30.0) -> None:
        self._offsets, self._topics, self._alarm_s = offsets, list(topics), alarm_s
        self._open = OpenTransactions()
        self._told: dict[tuple[str, int], float] = {}

    def run(self, stop: threading.Event) -> None:
        """Look every 5 s until ``stop`` is set; a broker that is away is somebody else's news."""
        while not stop.wait(_LOOK_EVERY_S):
            try:
                self.look(time.monotonic())
            except EverstateError as error:
                log.debug("open transactions: %s", error)

    def look(self, now_s: float) -> dict[tuple[str, int], float]:
        """Seconds for which each partition past the alarm was held back; told once a minute."""
        stable = self._offsets.stable_ends(self._topics)
        held = self._open.observe(stable, self._offsets.high_watermarks(self._topics), now_s)
        late = {place: held_s for place, held_s in held.items() if held_s >= self._alarm_s}
        self._told = {place: told_s for place, told_s in self._told.items() if place in late}
        for (topic, partition), held_s in late.items():
            if now_s - self._told.get((topic, partition), -_TELL_AGAIN_S) >= _TELL_AGAIN_S:
                self._told[topic, partition] = now_s
                log.warning(
                    "%s[%d] is held back for %.0f s by an open transaction at offset %d: its "
                    "writer hangs or was killed; the broker ends it after the writer's time-out",
                    topic,
                    partition,
                    held_s,
                    stable[topic, partition],
                )
        return late
