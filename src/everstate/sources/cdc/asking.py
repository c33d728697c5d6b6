"""Requests snapshots of the keys whose rows are held because their state before is unknown.

Runs in a thread beside cleaning and never blocks it: while the captured database is unreachable,
only the requests are delayed. The requests are kept in memory only; after a restart a key may be
requested once more, and a row that is read twice changes nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from prometheus_client import Counter

from everstate.changes.keys import EntityKey
from everstate.config import Config
from everstate.declarations.captures import CAPTURE_KINDS, Capture
from everstate.errors import EverstateError
from everstate.retrying import Retries
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.holding import HeldEntity
from everstate.sources.cdc.snapshots import Signalled, signal_keys

logger = logging.getLogger("everstate.sources.cdc")

ASKED = Counter(
    "everstate_clean_snapshots_asked", "Keys that a snapshot was asked for", ["capture"]
)

KEYS_MAX: Final = 200
"""Keys in one signal: its condition must fit into the ``data`` column of MariaDB's signal table."""
AGAIN_S: Final = 30.0
"""Seconds until a key that still waits is requested again; doubled each time."""
AGAIN_S_MAX: Final = 600.0
_AWAY_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, AGAIN_S_MAX)
"""Seconds until a database that could not be signalled is asked again."""
_EVERY_S: Final = 1.0
_JOIN_S: Final = 5.0

Ask = Callable[[str, Sequence[Mapping[str, Any]]], Signalled]
"""Requests rows of a table in one signal; raises EverstateError when that fails now."""


@dataclass(slots=True)
class _Wish:
    """One key that waits: its table, key columns as the source has them, time of next request."""

    table: str
    columns: Mapping[str, Any]
    due_s: float
    asks: int = 0


class Asker:
    """Requests snapshots of the held keys of one capture, in its own thread; see :meth:`begin`.

    Cleaning reports the held entities with :meth:`renew` and :meth:`note`. Only their keys are
    kept, at most as many as `pipeline.held_max` rows. ``ask=None``: we may not write signals to
    the database; what to do instead is logged once.
    """

    def __init__(
        self, name: str, ask: Ask | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._ask, self._clock = name, ask, clock
        self._wishes: dict[EntityKey, _Wish] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._retries = Retries(clock=clock)
        self._has_warned = False

    @property
    def waiting(self) -> int:
        """Keys that wait for their snapshot."""
        return len(self._wishes)

    def begin(self) -> None:
        """Start to send due requests each second, until :meth:`close`; idempotent."""
        if self._ask is None or self._thread is not None:
            return
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name=f"ask-{self._name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the requests; waits at most 5 s for one that is being sent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            self._thread = None

    def renew(self, held: Mapping[EntityKey, HeldEntity]) -> None:
        """Replace the list of held entities; keys that were requested and still wait are kept."""
        for entity in {**self._wishes, **held}:
            self.note(entity, held.get(entity))

    def note(self, entity: EntityKey, held: HeldEntity | None) -> None:
        """Update one held entity; ``None``: no row of it is held any more."""
        if held is None or not held.waits_for_state:
            self._wishes.pop(entity, None)
            return
        if self._ask is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "capture %s: rows of %s wait for a snapshot of their key, and its database is not "
                "ours to signal: have its connector read them again (`everstate cdc held %s` lists "
                "them)",
                *(self._name, held.table, self._name),
            )
        elif self._ask is not None and entity not in self._wishes:
            columns = dict(held.columns or held.rows[0].columns)
            self._wishes[entity] = _Wish(held.table, columns, self._clock())

    def step(self) -> int:
        """Request the keys that are due, oldest first, with one signal per table.

        Out: how many keys were requested. After a failure it pauses, each time for longer.
        """
        now_s = self._clock()
        if self._ask is None or not self._retries.is_due(self._name):
            return 0
        count = 0
        for table, wishes in self._due(now_s).items():
            try:
                signalled = self._ask(table, [wish.columns for wish in wishes])
            except EverstateError as error:
                pause_s = self._retries.failed(self._name, _AWAY_S)
                logger.warning(
                    "capture %s: a snapshot of keys of %s is asked for in %.0f s: %s",
                    *(self._name, table, pause_s, error),
                )
                break
            self._retries.forget(self._name)
            count += self._note_asked(table, wishes, signalled)
        return count

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            self.step()

    def _due(self, now_s: float) -> dict[str, list[_Wish]]:
        found: dict[str, list[_Wish]] = {}
        for wish in list(self._wishes.values()):  # a copy: cleaning changes the list meanwhile
            if wish.due_s <= now_s:
                found.setdefault(wish.table, []).append(wish)
        return {table: wishes[:KEYS_MAX] for table, wishes in found.items()}

    def _note_asked(self, table: str, wishes: Sequence[_Wish], signalled: Signalled) -> int:
        now_s = self._clock()
        for index, wish in enumerate(wishes):
            is_refused = index in signalled.refused
            wait_s = AGAIN_S_MAX if is_refused else AGAIN_S * 2.0 ** min(wish.asks, 10)
            wish.due_s = now_s + min(AGAIN_S_MAX, wait_s)
            if is_refused and wish.asks == 0:
                logger.warning(
                    "capture %s: no snapshot can be asked for of %s %s, one of %d keys: %s",
                    *(self._name, table, dict(wish.columns), len(signalled.refused)),
                    signalled.refused[index],
                )
            wish.asks += 1
        count = len(wishes) - len(signalled.refused)
        if count:
            ASKED.labels(self._name).inc(count)
            logger.info(
                "capture %s: asked for a snapshot of %d keys of %s (signal %s)",
                *(self._name, count, table, signalled.id),
            )
        return count


def can_ask(capture: Capture) -> bool:
    """Whether the clean role may signal the captured database: a ``dsn`` says where it is."""
    return capture.dsn is not None and capture.kind in CAPTURE_KINDS


def asker_of(config: Config, capture: Capture) -> Asker:
    """The asker of a declared capture; opens no connection.

    Without a ``dsn``, or for a kind that we cannot signal, the asker only logs a warning.
    """
    ask = partial(signal_keys, Capturing(config, capture, local=False))
    return Asker(capture.name, ask if can_ask(capture) else None)
