"""Connections to Cassandra use TLS when the settings have authorities, and only then."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from everstate.cassandra import Database
from everstate.config import load
from everstate.errors import InvalidConfig, Unavailable

TLS = Path(__file__).parents[1] / "tls"
PROTOCOL = 5


@contextmanager
def listening(received: list[bytes]) -> Iterator[int]:
    """A server with TLS that notes the first byte of each connection, and closes it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "certificate.pem", TLS / "key.pem")

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            with plain, suppress(OSError), context.wrap_socket(plain, server_side=True) as secure:
                received.append(secure.recv(1))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize("is_secure", [True, False])
def test_the_requests_are_encrypted_when_authorities_are_set(
    tmp_path: Path, is_secure: bool
) -> None:
    received = list[bytes]()
    with listening(received) as port:
        given: dict[str, object] = {"contact_points": ["127.0.0.1"], "port": port}
        if is_secure:
            given["ssl_cafile"] = str(TLS / "certificate.pem")
        with pytest.raises(Unavailable), Database(load(tmp_path, cassandra=given)) as database:
            database.execute("SELECT now() FROM system.local")
    assert [first[0] & 0x7F for first in received[:1]] == ([PROTOCOL] if is_secure else [])


def test_a_file_without_authorities_is_named(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    given = {"contact_points": ["127.0.0.1"], "ssl_cafile": "ca.pem"}
    with pytest.raises(InvalidConfig, match="ssl_cafile"):
        Database(load(tmp_path, cassandra=given)).execute("SELECT now() FROM system.local")
