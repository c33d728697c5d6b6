"""What a test has of a store of views: its server, and what a user's own client reads there.

A new store has one subclass, which the contracts of stores and the tests of kills use.
"""

from __future__ import annotations

import os
import secrets
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

from everstate.config import Config
from everstate.sections import StoresConfig
from everstate.views.tables import Merge
from kit.settings import altered

Found: TypeAlias = dict[str, Any]
"""A row as a client finds it, by the names of the view's columns, and its key as `_key`."""


class ServedStore(ABC):
    """The server of a store, which can be killed, and started with its data at the same address."""

    name: ClassVar[str]
    """As a view names the store, and as the section of the settings is named."""
    plain: ClassVar[str]
    """The part of an address before the host."""
    secure: ClassVar[str]
    """The same with TLS."""
    port: int

    @classmethod
    @abstractmethod
    def alone(cls, folder: Path, *, fsync: bool = True) -> AbstractContextManager[Self]:
        """A server of the caller's own, with its data in a folder; raises LocalStackError."""

    @property
    def url(self) -> str:
        """The address, as in the settings."""
        return f"{self.plain}127.0.0.1:{self.port}"

    @property
    def unset(self) -> str:
        """What the reason says, as a pattern, where no address is configured."""
        return rf"stores\.{self.name}\.url is not set"

    @property
    def section(self) -> str:
        """The section of everstate.toml with the address."""
        return f'[stores.{self.name}]\nurl = "{self.url}"\n'

    def settings(self, config: Config, url: str | None = None, **more: Any) -> Config:
        """Settings of a project that uses this server, or another address of it."""
        server = config.stores.server(self.name)
        server = server.model_copy(update={"url": url or self.url, **more})
        stores = StoresConfig(**{**config.stores.servers, self.name: server})
        return config.model_copy(update={"stores": stores})

    def away(self, config: Config) -> Config:
        """Settings with an address at which nobody answers."""
        return self.settings(config, f"{self.plain}127.0.0.1:1")

    def secured(self, config: Config, port: int, trusted: Path | None, **more: Any) -> Config:
        """Settings with a port that has TLS, and the certificates that are trusted."""
        url = f"{self.secure}127.0.0.1:{port}"
        return self.settings(config, url, ssl_cafile=trusted, **more)

    @contextmanager
    def own(self) -> Iterator[Config]:
        """Settings with names in the store that no other test has; they are deleted afterwards."""
        schema = f"t{secrets.token_hex(6)}"
        config = altered(self.settings(Config()), views={"schema_name": schema})
        yield config
        self.clean(config)

    @abstractmethod
    def start(self) -> None:
        """Start it, and wait until it answers."""

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL it."""

    @property
    def process(self) -> int | None:
        """The id of its process; ``None``: it has none of its own."""
        return None

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Let its process, if it has one, take connections and answer nothing for a while."""
        process = self.process
        if process is None:
            yield
            return
        os.kill(process, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(process, signal.SIGCONT)

    @abstractmethod
    def refusals(self, config: Config) -> Iterable[AbstractContextManager[None]]:
        """States in which it reads and takes no writes: it is full, or read-only."""

    @abstractmethod
    def read(self, config: Config, view: str, merge: Merge = "row") -> list[Found] | None:
        """All rows that readers of a view find; ``None`` if they find no view."""

    @abstractmethod
    def spoil(self, config: Config, view: str, key: str, column: str, value: str) -> None:
        """Change the row of a key behind the back of the pipeline."""

    @abstractmethod
    def left(self, config: Config) -> list[str]:
        """All names that the project has in the store."""

    @abstractmethod
    def clean(self, config: Config) -> None:
        """Delete all that the project has in the store."""
