"""A port with TLS before a server that has none."""

from __future__ import annotations

import selectors
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
                    copy_both_ways(outer, inner)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Door) as door:
        door.daemon_threads = True
        threading.Thread(target=door.serve_forever, daemon=True).start()
        yield door.server_address[1]
        door.shutdown()


def copy_both_ways(outer: socket.socket, inner: socket.socket) -> None:
    """Copy what comes from either side to the other, until one of them ends."""
    others = {outer: inner, inner: outer}
    # select.select takes no file number above 1,023.
    with selectors.DefaultSelector() as selector:
        for side in others:
            selector.register(side, selectors.EVENT_READ, side)
        while True:
            # No selector knows of bytes that TLS has read already.
            has_read = isinstance(outer, ssl.SSLSocket) and outer.pending()
            for source in [outer] if has_read else [key.data for key, _ in selector.select()]:
                received = source.recv(65_536)
                if not received:
                    return
                others[source].sendall(received)
