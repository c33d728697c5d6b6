"""Connections to PostgreSQL that are kept: one that the server closed is not lent again."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest
from psycopg.pq import TransactionStatus

from everstate.postgres import Connections


class Connected:
    """A connection over a socket, with any file number."""

    def __init__(self, number: int) -> None:
        self.server, client = socket.socketpair()
        os.dup2(client.detach(), number)
        self.number, self.closed = number, False
        self.info = SimpleNamespace(transaction_status=TransactionStatus.IDLE)

    def fileno(self) -> int:
        return self.number

    def close(self) -> None:
        self.closed = True
        os.close(self.number)


@pytest.mark.parametrize("number", [700, 1500])
def test_a_connection_is_lent_again_until_its_server_closes_it(number: int) -> None:
    """`select` takes no file numbers beyond 1,023; a server with many clients has such."""
    opened: list[Connected] = []

    def connect() -> Any:
        opened.append(Connected(number))
        return cast(Any, opened[-1])

    connections = Connections(connect, connections_max=1)
    for _ in range(3):
        with connections.lend():
            pass
    assert len(opened) == 1
    opened[0].server.close()
    with connections.lend():
        pass
    assert (len(opened), opened[0].closed) == (2, True)
    connections.close()
    assert opened[1].closed
    opened[1].server.close()
