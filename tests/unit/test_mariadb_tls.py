"""Our own connection to a captured MariaDB is encrypted where its address asks for it."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import certifi
import pytest

from everstate.declarations.captures import Capture, Table
from everstate.errors import CaptureFailed, InvalidConfig, Unavailable
from everstate.sources.cdc.mariadb import MariaDatabase
from everstate.sources.cdc.names import CaptureNames

TLS = Path(__file__).parents[1] / "tls"
_SSL, _PLAIN = 0x800, 0x88200
"""Capabilities of a server: TLS; and protocol 4.1 with a plugin for passwords."""


def greeting(capabilities: int) -> bytes:
    """The first packet of a server."""
    low, high = struct.pack("<I", capabilities)[:2], struct.pack("<I", capabilities)[2:]
    body = b"\n11.4.2-MariaDB\0" + bytes(4) + b"12345678\0" + low + b"\x2d\0\0" + high
    body += bytes([21]) + bytes(10) + b"123456789012\0" + b"mysql_native_password\0"
    return struct.pack("<I", len(body))[:3] + b"\0" + body


@contextmanager
def server(capabilities: int, received: list[bytes]) -> Iterator[int]:
    """A server that greets one client and records what it sends in the clear, and in TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "certificate.pem", TLS / "key.pem")

    def serve() -> None:
        plain, _ = listener.accept()
        with plain, suppress(OSError):
            plain.sendall(greeting(capabilities))
            received.append(plain.recv(36 if capabilities & _SSL else 4_096))
            if capabilities & _SSL:
                with context.wrap_socket(plain, server_side=True) as secure:
                    received.append(secure.recv(4_096))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
    thread.join()


def connect(tmp_path: Path, port: int, options: str) -> None:
    dsn = f"mariadb://reader:hunter2@127.0.0.1:{port}/shop{options}"
    tables = {"shop.orders": Table(entity="order")}
    capture = Capture(name="shop", kind="mariadb", tables=tables, dsn=dsn)
    MariaDatabase(capture, CaptureNames("everstate", capture.name), dsn)


TRUST = "?ssl-mode=trust"
VERIFY = f"?ssl-mode=verify-ca&ssl-ca={TLS / 'certificate.pem'}"


@pytest.mark.parametrize("options", [TRUST, VERIFY])
def test_the_user_is_named_only_after_the_connection_is_encrypted(
    tmp_path: Path, options: str
) -> None:
    received: list[bytes] = []
    with server(_PLAIN | _SSL, received) as port, pytest.raises(Unavailable):
        connect(tmp_path, port, options)
    clear, secure = received
    assert len(clear) == 36
    assert b"reader" not in clear
    assert b"reader" in secure


@pytest.mark.parametrize("options", [TRUST, VERIFY])
def test_a_server_without_tls_is_refused_before_it_gets_a_password(
    tmp_path: Path, options: str
) -> None:
    received: list[bytes] = []
    with server(_PLAIN, received) as port, pytest.raises((CaptureFailed, Unavailable), match="SSL"):
        connect(tmp_path, port, options)
    assert received == [b""]


def test_a_server_whose_certificate_another_authority_signed_is_refused(tmp_path: Path) -> None:
    received: list[bytes] = []
    with server(_PLAIN | _SSL, received) as port:
        with pytest.raises((CaptureFailed, Unavailable), match=r"(?i)certificate"):
            connect(tmp_path, port, f"?ssl-mode=verify-full&ssl-ca={certifi.where()}")
    assert [b"reader" in each for each in received] == [False]


def test_a_file_without_certificates_is_named(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(InvalidConfig, match="ssl-ca"):
        connect(tmp_path, 1, f"?ssl-mode=verify-ca&ssl-ca={tmp_path / 'ca.pem'}")
