"""Writes the timetable into the store, as the airports' systems would, only faster."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import datetime
from itertools import islice

from everstate.config import Config
from everstate.demo.flights import app
from everstate.demo.play import FlightStep, Timetable, play
from everstate.postgres import connect
from everstate.sources.stores.postgres import EntityStore

CHUNK = 2_000
"""Changes that are written in one transaction."""


class Feeder:
    """Writes every step of a timetable in a thread of its own.

    ``written`` and ``clock`` may be read at any time; ``error`` holds what ended the thread early.
    """

    def __init__(self, config: Config, timetable: Timetable) -> None:
        self._config, self._timetable = config, timetable
        self._stop = threading.Event()
        self._followed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="demo-feeder", daemon=True)
        self.written = 0
        self.clock: datetime | None = None
        """When the newest written change happened."""
        self.error: BaseException | None = None

    def prepare(self) -> None:
        """Create the store's tables, and read the progress of an earlier run."""
        with EntityStore(self._config, app.entity_type("flight")) as store:
            store.install()
        self.written = changes_written(self._config)

    def start(self) -> None:
        """Write the first transaction, and the others once `go_on` is called."""
        if self._thread.ident is None:
            self._thread.start()

    def go_on(self) -> None:
        """Write the other transactions, after the first one has reached views and archive."""
        self._followed.set()

    def stop(self) -> None:
        """Stop after the current transaction."""
        self._stop.set()
        self._followed.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def done(self) -> bool:
        """Whether every step is written."""
        return self.written >= self._timetable.changes

    def _run(self) -> None:
        try:
            with EntityStore(self._config, app.entity_type("flight")) as store:
                for chunk in _chunks(play(self._timetable), skip=self.written):
                    store.put_many(
                        [step.flight for step in chunk],
                        provenance=[step.provenance for step in chunk],
                        occurred_at=[step.occurred_at for step in chunk],
                        event=[step.event for step in chunk],
                    )
                    self.written += len(chunk)
                    self.clock = chunk[-1].occurred_at
                    self._followed.wait()
                    if self._stop.is_set():
                        return
        except Exception as cause:
            self.error = cause


def changes_written(config: Config) -> int:
    """How many steps the store holds: each is one version of one flight."""
    with connect(config.store_dsn) as connection:
        row = connection.execute("SELECT sum(version) FROM everstate_store.flight").fetchone()
    return int(row[0]) if row and row[0] is not None else 0


def _chunks(steps: Iterator[FlightStep], skip: int) -> Iterator[list[FlightStep]]:
    ahead = islice(steps, skip, None)
    while chunk := list(islice(ahead, CHUNK)):
        yield chunk
