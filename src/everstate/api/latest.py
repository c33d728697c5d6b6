"""Events read back from the views, for the event routes."""

from __future__ import annotations

import threading

from everstate.app import App
from everstate.config import Config
from everstate.errors import NotFound
from everstate.serving import Reader


class Latest:
    """Reads the view `latest`; each thread has a connection of its own."""

    def __init__(self, config: Config, app: App) -> None:
        self._config, self._app = config, app
        self._own = threading.local()
        self._readers: list[Reader] = []

    def find(self, entity: str, key: str) -> bytes:
        """State of an entity as JSON; raises NotFound when the views do not have it (yet)."""
        reader: Reader | None = getattr(self._own, "reader", None)
        if reader is None:
            reader = self._own.reader = Reader(self._config, self._app)
            self._readers.append(reader)
        if "\x00" in key:
            raise NotFound(f"{entity} {key!r} was never seen.")
        try:
            entity_type = self._app.entity_type(entity)
            return entity_type.encode(entity_type.validate(reader.get(entity, key).state))
        except NotFound as error:
            raise NotFound(
                error.message, advice="The views follow the log by a moment while they are kept."
            ) from error

    def close(self) -> None:
        """Give up the connections."""
        for reader in self._readers:
            reader.close()
