"""PostgreSQL for rooms that are no store: kept connections, its errors, and names in statements."""

from __future__ import annotations

import fcntl
import os
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest
from psycopg import DatabaseError, errors
from psycopg.pq import TransactionStatus

from everstate.errors import (
    InUse,
    MissingColumn,
    MissingTable,
    StatementRefused,
    Unavailable,
    ValueRefused,
)
from everstate.postgres import Connections, identifier, literal, refusals, views_errors


class Connected:
    """A connection over a socket, with the first free file number from ``least`` on.

    A number of one's own choice may be that of another file of this process.
    """

    def __init__(self, least: int) -> None:
        self.server, client = socket.socketpair()
        with client:
            self.number = fcntl.fcntl(client, fcntl.F_DUPFD_CLOEXEC, least)
        self.closed = False
        self.info = SimpleNamespace(transaction_status=TransactionStatus.IDLE)

    def fileno(self) -> int:
        return self.number

    def close(self) -> None:
        self.closed = True
        os.close(self.number)


@pytest.mark.parametrize("least", [700, 1500])
def test_a_connection_is_lent_again_until_its_server_closes_it(least: int) -> None:
    """`select` takes no file numbers beyond 1,023; a server with many clients has such."""
    opened: list[Connected] = []

    def connect() -> Any:
        opened.append(Connected(least))
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


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (errors.UndefinedTable("t"), MissingTable),
        (errors.InvalidSchemaName("s"), MissingTable),
        (errors.UndefinedColumn("c"), MissingColumn),
        (errors.LockNotAvailable("l"), InUse),
        (errors.SerializationFailure("s"), InUse),
        (errors.DependentObjectsStillExist("d"), InUse),
        (errors.NumericValueOutOfRange("v"), ValueRefused),
        (errors.SyntaxError("s"), StatementRefused),
        (errors.UniqueViolation("u"), StatementRefused),
        (errors.InvalidRoleSpecification("r"), StatementRefused),
        (DatabaseError("an error code of a function of one's own"), StatementRefused),
    ],
)
def test_a_refused_statement_is_an_error_of_the_tree(
    cause: Exception, kind: type[StatementRefused]
) -> None:
    with pytest.raises(StatementRefused) as refused, refusals():
        raise cause
    assert type(refused.value) is kind
    assert refused.value.__cause__ is cause


@pytest.mark.parametrize(
    "cause",
    [
        errors.DeadlockDetected("d"),
        errors.AdminShutdown("a"),
        errors.QueryCanceled("q"),
        errors.IdleInTransactionSessionTimeout("i"),
    ],
)
def test_an_error_of_the_server_is_no_refusal(cause: Exception) -> None:
    with pytest.raises(Unavailable), refusals(), views_errors("postgresql://u:pw@h/d"):
        raise cause
    with pytest.raises(type(cause)), refusals():
        raise cause


def test_a_refusal_says_the_first_line_only() -> None:
    with pytest.raises(StatementRefused) as refused, refusals():
        raise errors.SyntaxError("no such thing\nLINE 1: SELECT 'secret'")
    assert refused.value.message == "no such thing"


def test_names_and_texts_are_quoted() -> None:
    assert identifier("own views", 'a"b') == '"own views"."a""b"'
    assert literal("it's \\") == " E'it''s \\\\'"
