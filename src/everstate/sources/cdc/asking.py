"""Asking for snapshots of the keys whose rows wait because their state before is unknown.

Runs beside cleaning and never in its way: a captured database that is away delays the asking and
nothing else. What was asked is remembered in memory only; a row that is read once more, after a
restart, is a re-read and changes nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import Counter

from everstate.config import Config
from everstate.errors import EverstateError
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.declaration import Capture
from everstate.sources.cdc.holding import HeldEntity
from everstate.sources.cdc.snapshots import Signalled, signal_keys

LOGGER = logging.getLogger("everstate.sources.cdc")

ASKED = Counter(
    "everstate_clean_snapshots_asked", "Keys that a snapshot was asked for", ["capture"]
)

KEYS_MAX: Final = 200
"""Keys of one signal: its condition stays within what MariaDB's column of signals takes."""
AGAIN_S: Final = 30.0
"""Seconds until a key that still waits is asked for again; twice as long each time."""
AGAIN_S_MAX: Final = 600.0
_EVERY_S: Final = 1.0
_JOIN_S: Final = 5.0

Entity = tuple[str, str]
"""Entity type and key."""
Ask = Callable[[str, Sequence[Mapping[str, Any]]], Signalled]
"""Asks in one signal for rows of a table; raises EverstateError when it cannot now."""


@dataclass(slots=True)
class _Wish:
    """One key that waits: its table, its key columns as the source has them, when to ask."""

    table: str
    columns: Mapping[str, Any]
    due_s: float
    asks: int = 0


class Asker:
    """Asks for the held keys of one capture, from a thread of its own; see :meth:`begin`.

    Cleaning tells what is held, with :meth:`renew` and :meth:`note`. Of that only keys are kept,
    as many as `pipeline.held_max` lets wait. ``ask=None``: the database is not ours to signal,
    and it is said once in the log what to do.
    """

    def __init__(
        self, name: str, ask: Ask | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._ask, self._clock = name, ask, clock
        self._wishes: dict[Entity, _Wish] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pause_s = _EVERY_S
        self._not_before_s = 0.0
        self._is_told = False

    @property
    def waiting(self) -> int:
        """Keys that wait for their snapshot."""
        return len(self._wishes)

    def begin(self) -> None:
        """Ask every second from now on, until :meth:`close`; again is no change."""
        if self._ask is None or self._thread is not None:
            return
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name=f"ask-{self._name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more; a connection that is being made is not waited for."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            self._thread = None

    def renew(self, held: Mapping[Entity, HeldEntity]) -> None:
        """Take over all that is held; what was asked and still waits stays asked."""
        with self._lock:
            for entity in self._wishes.keys() - held.keys():
                del self._wishes[entity]
        for entity, one in held.items():
            self.note(entity, one)

    def note(self, entity: Entity, held: HeldEntity | None) -> None:
        """Take over what became of one entity; ``None``: nothing of it is held any more."""
        if held is None or not held.waits_for_state:
            with self._lock:
                self._wishes.pop(entity, None)
            return
        if self._ask is None:
            self._tell_once(held)
            return
        with self._lock:
            if entity not in self._wishes:
                columns = dict(held.columns or held.rows[0].columns)
                self._wishes[entity] = _Wish(held.table, columns, self._clock())

    def step(self) -> int:
        """Ask for the keys that are due, oldest first, in one signal a table.

        Out: how many keys were asked for. Asks nothing for a while when the database is away.
        """
        now_s = self._clock()
        if self._ask is None or now_s < self._not_before_s:
            return 0
        count = 0
        for table, wishes in self._due(now_s).items():
            try:
                signalled = self._ask(table, [wish.columns for wish in wishes])
            except EverstateError as error:
                self._put_off(table, error)
                break
            self._pause_s = _EVERY_S
            count += self._note_asked(table, wishes, signalled)
        return count

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            self.step()

    def _due(self, now_s: float) -> dict[str, list[_Wish]]:
        found: dict[str, list[_Wish]] = {}
        with self._lock:
            for wish in self._wishes.values():
                if wish.due_s <= now_s:
                    listed = found.setdefault(wish.table, [])
                    if len(listed) < KEYS_MAX:
                        listed.append(wish)
        return found

    def _note_asked(self, table: str, wishes: Sequence[_Wish], signalled: Signalled) -> int:
        now_s = self._clock()
        for index, wish in enumerate(wishes):
            is_refused = index in signalled.refused
            wait_s = AGAIN_S_MAX if is_refused else AGAIN_S * 2.0 ** min(wish.asks, 10)
            wish.due_s = now_s + min(AGAIN_S_MAX, wait_s)
            if is_refused and wish.asks == 0:
                self._tell_refused(table, wish, signalled.refused[index], len(signalled.refused))
            wish.asks += 1
        count = len(wishes) - len(signalled.refused)
        if count:
            ASKED.labels(self._name).inc(count)
            LOGGER.info(
                "capture %s: asked for a snapshot of %d keys of %s (signal %s)",
                *(self._name, count, table, signalled.id),
            )
        return count

    def _tell_refused(self, table: str, wish: _Wish, reason: str, count: int) -> None:
        LOGGER.warning(
            "capture %s: no snapshot can be asked for of %s %s, one of %d keys: %s",
            *(self._name, table, dict(wish.columns), count, reason),
        )

    def _put_off(self, table: str, error: EverstateError) -> None:
        """Wait longer each time; the keys stay due."""
        self._not_before_s = self._clock() + self._pause_s
        LOGGER.warning(
            "capture %s: a snapshot of keys of %s is asked for in %.0f s: %s",
            *(self._name, table, self._pause_s, error),
        )
        self._pause_s = min(AGAIN_S_MAX, self._pause_s * 2)

    def _tell_once(self, held: HeldEntity) -> None:
        if self._is_told:
            return
        self._is_told = True
        LOGGER.warning(
            "capture %s: rows of %s wait for a snapshot of their key, and its database is not ours "
            "to signal: have its connector read them again (`everstate cdc held %s` lists them)",
            *(self._name, held.table, self._name),
        )


def can_ask(capture: Capture) -> bool:
    """Whether the clean role may signal the captured database: a ``dsn`` says where it is."""
    return capture.dsn is not None and capture.kind in ("postgresql", "mariadb")


def asker_of(config: Config, capture: Capture) -> Asker:
    """The asker of a declared capture; opens no connection.

    It only tells when the capture has no ``dsn``, or is of a kind that has no signals of ours.
    """
    if not can_ask(capture):
        return Asker(capture.name, None)
    capturing = Capturing(config, capture, local=False)
    return Asker(capture.name, lambda table, keys: signal_keys(capturing, table, keys))
