"""The servers of a test run, as fixtures hand them out."""

from __future__ import annotations

from dataclasses import dataclass

from everstate.config import Config
from everstate.local import Stack


@dataclass(frozen=True)
class RunningStack:
    """The servers of this test run."""

    config: Config
    servers: Stack
    given: Config
    """The settings without the addresses."""

    @property
    def bootstrap_servers(self) -> str:
        return self.config.bootstrap_servers

    @property
    def dsn(self) -> str:
        """A superuser's database."""
        return self.config.store_dsn
