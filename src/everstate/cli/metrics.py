"""Serves each role's metrics at `/metrics`, for Prometheus."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from prometheus_client import start_http_server

from everstate.config import Config
from everstate.parts import figures_at

log = logging.getLogger(__name__)

ROLES: Final = (
    *("relay", "pipeline", "publisher", "commands", "clean", "serve", "derive", "alerts"),
)
"""Roles, in the order of their ports."""


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
        server, thread = start_http_server(port, section.host)
    except OSError as error:
        log.warning("no figures at %s:%d: %s", section.host, port, error)
        yield
        return
    figures_at(f"http://{section.host}:{server.server_port}/metrics")
    try:
        yield
    finally:
        figures_at(None)
        server.shutdown()
        server.server_close()
        thread.join()
