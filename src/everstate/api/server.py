"""The HTTP server: uvicorn, on this machine only unless callers have tokens."""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import threading
from collections.abc import Callable

import uvicorn

from everstate.api.application import create_api
from everstate.api.guards import FewInvalid, timed_protocol
from everstate.api_config import ApiConfig
from everstate.app import App
from everstate.config import Config
from everstate.errors import InvalidConfig, Unavailable
from everstate.loopback import is_loopback

logger = logging.getLogger("everstate.api")

_GRACE_S = 20
_BACKLOG = 512
_POLL_S = 0.05
_FEW = FewInvalid()
_SOCKET_BYTES_MAX = 4_096
"""A WebSocket's client has nothing to say; what it sends anyway is small."""


def serve(
    config: Config,
    app: App,
    stop: threading.Event,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until ``stop`` is set, then finish the requests in progress.

    ``on_ready`` gets the address when the server accepts requests. Raises InvalidConfig for an
    address that other machines can reach when no tokens are configured, or that is in use, and
    Unavailable.
    """
    host, port = config.api.host, config.api.port
    check_reach(config)
    certificate = certificate_of(config.api)
    if not certificate and not is_loopback(host):
        logger.warning("tokens are sent unencrypted: set api.ssl_certfile, or use a TLS proxy")
    listener = _listen(host, port)
    with listener:
        api = create_api(config, app)
        server = uvicorn.Server(
            uvicorn.Config(
                api,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_GRACE_S,
                timeout_keep_alive=60,
                lifespan="on",
                ws_max_size=_SOCKET_BYTES_MAX,
                http=timed_protocol(
                    config.api.receive_timeout_s,
                    config.api.send_timeout_s,
                    config.api.connections_max,
                ),
                **certificate,  # type: ignore[arg-type]
            )
        )
        logging.getLogger("uvicorn.error").addFilter(_FEW)
        # In a thread of its own uvicorn does not install signal handlers.
        runner = threading.Thread(target=server.run, args=([listener],), name="http")
        runner.start()
        try:
            told = False
            while runner.is_alive() and not stop.wait(_POLL_S):
                if server.started and not told:
                    told = True
                    if on_ready is not None:
                        on_ready(address_of(listener, secure=bool(certificate)))
        finally:
            # The server waits for responses in progress, and a stream's never ends by itself.
            api.state.end_streams()
            server.should_exit = True
            runner.join()
    if not stop.is_set():
        raise Unavailable("the HTTP server ended; its log has the reason.")


def check_reach(config: Config) -> None:
    """Raise InvalidConfig when other machines could write without a token."""
    if not config.api.tokens and not is_loopback(config.api.host):
        raise InvalidConfig(
            "api.host",
            config.api.host,
            "an address of this machine only (127.0.0.1), or callers with tokens ([api.tokens])",
        )


def certificate_of(api: ApiConfig) -> dict[str, str]:
    """The server's options for TLS; none without a certificate.

    Raises InvalidConfig for files that are not valid, before the server listens.
    """
    if api.ssl_certfile is None:
        if api.ssl_keyfile is not None:
            raise InvalidConfig("api.ssl_certfile", None, "the certificate of api.ssl_keyfile")
        return {}
    given = api.ssl_keyfile_password
    password = "" if given is None else given.get_secret_value()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            api.ssl_certfile, api.ssl_keyfile, lambda: password
        )
    except OSError as cause:
        reason = getattr(cause, "reason", None) or cause.strerror or str(cause)
        raise InvalidConfig(
            "api.ssl_certfile",
            str(api.ssl_certfile),
            f"a certificate chain in PEM whose key is in it or in api.ssl_keyfile ({reason})",
        ) from None
    options = {"ssl_certfile": str(api.ssl_certfile)}
    if api.ssl_keyfile is not None:
        options["ssl_keyfile"] = str(api.ssl_keyfile)
    return {**options, "ssl_keyfile_password": password} if password else options


def address_of(listener: socket.socket, *, secure: bool = False) -> str:
    """URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as cause:
        if isinstance(cause, socket.gaierror) or cause.errno == errno.EADDRNOTAVAIL:
            expected = f"a name or an address of this machine ({cause.strerror})"
            raise InvalidConfig("api.host", host, expected) from cause
        raise InvalidConfig(
            "api.port", port, f"a free port of {host} ({cause.strerror})"
        ) from cause
    # Inherited by each connection. asyncio sets it only where a socket names its protocol, and this
    # one does not; without it the body of an answer waits 40 ms for the client to note its head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
