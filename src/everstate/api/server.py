"""The HTTP server: uvicorn, on this machine only unless callers have tokens."""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
from collections.abc import Callable

import uvicorn

from everstate.api.application import create_api
from everstate.app import App
from everstate.config import Config
from everstate.errors import InvalidConfig, Unavailable

LOGGER = logging.getLogger("everstate.api")

_GRACE_S = 20
_BACKLOG = 512
_POLL_S = 0.05


def serve(
    config: Config,
    app: App,
    stop: threading.Event,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until ``stop`` is set, then finish the requests in hand.

    ``on_ready`` gets the address when requests are answered. Raises InvalidConfig for an address
    that others can reach while nobody needs a token, or that is taken, and Unavailable.
    """
    host, port = config.api.host, config.api.port
    check_reach(config)
    listener = _listen(host, port)
    with listener:
        server = uvicorn.Server(
            uvicorn.Config(
                create_api(config, app),
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_GRACE_S,
                timeout_keep_alive=60,
                lifespan="on",
            )
        )
        # In a thread of its own uvicorn leaves the signals to us.
        runner = threading.Thread(target=server.run, args=([listener],), name="http")
        runner.start()
        try:
            told = False
            while runner.is_alive() and not stop.wait(_POLL_S):
                if server.started and not told:
                    told = True
                    if on_ready is not None:
                        on_ready(address_of(listener))
        finally:
            server.should_exit = True
            runner.join()
    if not stop.is_set():
        raise Unavailable("the HTTP server ended; its log says why.")


def check_reach(config: Config) -> None:
    """Raise InvalidConfig when others than this machine could write without a token."""
    if not config.api.tokens and not is_loopback(config.api.host):
        raise InvalidConfig(
            "api.host",
            config.api.host,
            "an address of this machine only (127.0.0.1), or callers with tokens ([api.tokens])",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_of(listener: socket.socket) -> str:
    """URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as cause:
        raise InvalidConfig(
            "api.port", port, f"a free port of {host} ({cause.strerror})"
        ) from cause
