"""Opens the client that the command routes send with."""

from __future__ import annotations

from everstate.app import App
from everstate.config import Config
from everstate.log.topics import Topics
from everstate.sources.commands import CommandClient


def open_commands(config: Config, app: App) -> CommandClient | None:
    """A client for the entity types that take commands; ``None``: there are none.

    Makes the topics that are missing; raises Unavailable.
    """
    if not app.command_groups:
        return None
    with Topics(config) as topics:
        topics.ensure_commands(app.command_groups)
    return CommandClient(config, app)
