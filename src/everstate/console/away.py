"""The server that does not answer, by its name: a page tells that, and no address."""

from __future__ import annotations

from everstate.config import Config
from everstate.errors import Unavailable, ViewsUnavailable
from everstate.log.lag import is_reachable


def naming_server(config: Config, error: Unavailable) -> Unavailable:
    """The error of a reader, whose public text names the server.

    Cost: an attempt to connect to the brokers, where it is not the views' database.
    """
    if error.public != error.fallback_message:
        return error  # it names the server itself
    if isinstance(error, ViewsUnavailable):
        who = "the views' database (PostgreSQL)"
    elif not is_reachable(config):
        who = "the log (Kafka)"
    else:
        return error
    return Unavailable(error.message, public=f"{who} does not answer.")
