"""Serves each role's metrics at `/metrics`, for Prometheus."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from everstate.config import Config
from everstate.loopback import host_name, is_loopback
from everstate.parts import figures_at

logger = logging.getLogger(__name__)

ROLES: Final = (
    *("relay", "pipeline", "publisher", "commands", "clean", "serve", "derive", "alerts"),
    "handlers",
)
"""Roles, in the order of their ports."""


class _Server6(ThreadingWSGIServer):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    """Closes a connection whose client sends or reads nothing for ten seconds; does not log."""

    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Write no access log."""


def only_local(host: str) -> Any:
    """The WSGI application of the metrics.

    On an address of this machine it refuses requests for another host name, as
    :class:`~everstate.api.guards.OnlyLocalNames` does.
    """
    metrics = make_wsgi_app()

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        if is_loopback(host) and not is_loopback(host_name(environ.get("HTTP_HOST", host))):
            start_response("421 Misdirected Request", [("Content-Length", "0")])
            return [b""]
        return metrics(environ, start_response)

    return answer


@contextmanager
def serving_figures(config: Config, role: str) -> Iterator[None]:
    """Serve the metrics of this process during the block; `everstate status` shows the address.

    If the port is in use, that is logged, and the role works without metrics.
    """
    section = config.metrics
    if not section.enabled:
        yield
        return
    port = 0 if section.port == 0 else section.port + ROLES.index(role)
    try:
        server = make_server(
            section.host,
            port,
            only_local(section.host),
            _Server6 if ":" in section.host else ThreadingWSGIServer,
            _Handler,
        )
    except OSError as error:
        logger.warning("no figures at %s:%d: %s", section.host, port, error)
        yield
        return
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    figures_at(f"http://{section.host}:{server.server_port}/metrics")
    try:
        yield
    finally:
        figures_at(None)
        server.shutdown()
        server.server_close()
        thread.join()
