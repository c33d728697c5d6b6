"""The client of `everstate serve`: read, write and follow entities over HTTP.

:class:`Client` blocks, :class:`AsyncClient` does not; they have the same methods. Needs the extra
``client`` (httpx) and nothing else of everstate: no Kafka, no database, no Spark.
"""

from everstate.client.asynchronous import AsyncClient
from everstate.client.blocking import Client
from everstate.client.events import Event
from everstate.client.feeds import FeedPage
from everstate.client.requests import Found, RequestFailed, Saved
from everstate.client.views import ViewRows

__all__ = [
    "AsyncClient",
    "Client",
    "Event",
    "FeedPage",
    "Found",
    "RequestFailed",
    "Saved",
    "ViewRows",
]
