"""A port with TLS before a server that has none."""

from __future__ import annotations

import select
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).parents[1] / "tls"
TRUSTED: Final = _FOLDER / "certificate.pem"
"""The certificate that it shows."""


@contextmanager
def tls_before(port: int) -> Iterator[int]:
    """A port with TLS from which the bytes of connections go to another port, and back."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TRUSTED, _FOLDER / "key.pem")

    class Door(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)) as inner:
                with context.wrap_socket(self.request, server_side=True) as outer:
                    _copy(outer, inner)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Door) as door:
        door.daemon_threads = True
        threading.Thread(target=door.serve_forever, daemon=True).start()
        yield door.server_address[1]
        door.shutdown()


def _copy(outer: ssl.SSLSocket, inner: socket.socket) -> None:
    """Copy what comes from either side to the other, until one of them ends."""
    while True:
        # What TLS has read already, no select tells.
        ready = [outer] if outer.pending() else select.select([outer, inner], [], [])[0]
        for source in ready:
            told = source.recv(65_536)
            if not told:
                return
            (inner if source is outer else outer).sendall(told)
