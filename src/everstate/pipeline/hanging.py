"""The alarm for hanging transactions: an open one holds back every reader of its partition (C5)."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Final

from everstate.errors import EverstateError
from everstate.log.positions import Offsets, OpenTransactions
from everstate.parts import PartConcern, found
from everstate.runtime.worker import Worker

logger = logging.getLogger(__name__)

_WARN_EVERY_S: Final = 60.0


class HangingTransactions(Worker):
    """Warns of partitions whose last stable offset stays below the end for ``alarm_s`` seconds.

    The broker aborts such a transaction after its time-out; until then archive and views of that
    partition do not move.
    """

    doing = "looking for open transactions"
    idle_s = 5.0
    begins_idle = True

    def __init__(self, offsets: Offsets, topics: Sequence[str], *, alarm_s: float = 30.0) -> None:
        self._offsets, self._topics, self._alarm_s = offsets, list(topics), alarm_s
        self._open = OpenTransactions()
        self._warned_s: dict[tuple[str, int], float] = {}

    def step(self) -> None:
        """Report what :meth:`look` finds; other parts report an unreachable broker."""
        try:
            found("open transactions", finding_of(self.look(time.monotonic())))
        except EverstateError as error:
            logger.debug("open transactions: %s", error)

    def look(self, now_s: float) -> dict[tuple[str, int], float]:
        """Seconds for which each partition past the alarm was held back; logged once a minute."""
        stable = self._offsets.stable_ends(self._topics)
        held = self._open.observe(stable, self._offsets.high_watermarks(self._topics), now_s)
        late = {place: held_s for place, held_s in held.items() if held_s >= self._alarm_s}
        self._warned_s = {
            place: warned_s for place, warned_s in self._warned_s.items() if place in late
        }
        for (topic, partition), held_s in late.items():
            if now_s - self._warned_s.get((topic, partition), -_WARN_EVERY_S) >= _WARN_EVERY_S:
                self._warned_s[topic, partition] = now_s
                logger.warning(
                    "%s[%d] cannot be read further for %.0f s because of an open transaction at "
                    "offset %d: its writer hangs or was killed; the broker aborts it after its "
                    "time-out",
                    topic,
                    partition,
                    held_s,
                    stable[topic, partition],
                )
        return late


def finding_of(late: Mapping[tuple[str, int], float]) -> PartConcern | None:
    """What needs attention about partitions that are held back; ``None``: nothing."""
    if not late:
        return None
    places = ", ".join(f"{topic}[{partition}]" for topic, partition in sorted(late))
    why = f"a transaction that does not end holds back the readers of {places}."
    return PartConcern("open transaction", why, "The broker ends it after its writer's time-out.")
