"""Events read back from the views, for the event routes."""

from __future__ import annotations

import queue

from everstate.app import App
from everstate.config import Config
from everstate.errors import NotFound
from everstate.serving import Reader


class Latest:
    """Reads the view `latest`; as many connections as there were questions at once."""

    def __init__(self, config: Config, app: App) -> None:
        self._config, self._app = config, app
        self._idle: queue.LifoQueue[Reader] = queue.LifoQueue()

    def find(self, entity: str, key: str) -> bytes:
        """State of an entity as JSON; raises NotFound when the views do not have it (yet)."""
        if "\x00" in key:
            raise NotFound(f"{entity} {key!r} was never seen.")
        entity_type = self._app.entity_type(entity)
        reader = self._reader()
        try:
            return entity_type.encode(entity_type.validate(reader.get(entity, key).state))
        except NotFound as error:
            advice = "The views follow the log by a moment, while `everstate run` keeps them."
            raise NotFound(error.message, advice=advice) from error
        finally:
            self._idle.put(reader)

    def close(self) -> None:
        """Give up the connections; no question may be open."""
        while not self._idle.empty():
            self._idle.get_nowait().close()

    def _reader(self) -> Reader:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return Reader(self._config, self._app)
