"""The client of `everstate serve`: read, write and follow entities over HTTP.

:class:`Client` blocks, :class:`AsyncClient` does not; they have the same methods. Needs the extra
``client`` (httpx, httpx-sse) and nothing else of everstate: no Kafka, no database, no Spark.
"""

from everstate.client.asynchronous import AsyncClient as AsyncClient
from everstate.client.blocking import Client as Client
from everstate.client.feeds import FeedPage as FeedPage
from everstate.client.requests import Event as Event
from everstate.client.requests import Found as Found
from everstate.client.requests import RequestFailed as RequestFailed
from everstate.client.requests import Saved as Saved
from everstate.client.requests import ViewRows as ViewRows
