"""The server that does not answer, by its name: a page tells that, and no address."""

from __future__ import annotations

from everstate.config import Config
from everstate.errors import Unavailable
from everstate.log.lag import is_reachable


def naming_server(config: Config, error: Unavailable) -> Unavailable:
    """The error of a reader, whose public text names the server.

    Cost: an attempt to connect to the brokers, where it is not the views' database.
    """
    if error.public != error.fallback_message:
        return error  # it names the server itself
    who = error.server
    if who is None:
        if is_reachable(config):
            return error
        who = "the log (Kafka)"
    return Unavailable(error.message, public=f"{who} does not answer.")
