"""Servers and processes: unavailable, fenced, or ended."""

from __future__ import annotations

from everstate.errors.base import EverstateError


class Unavailable(EverstateError):
    """A server does not answer now; everstate continues by itself when it is available again."""

    retryable = True
    exit_code = 6
    http_status = 503
    fallback_message = "a server that is needed does not answer now; send the request again."
    server: str | None = None
    """Which server it is, where pages name it; ``None``: whoever raised it does not know."""


class StatementRefused(EverstateError):
    """PostgreSQL refused a statement; the message is the first line of its reason."""


class MissingTable(StatementRefused):
    """A statement names a table or a schema that does not exist."""


class MissingColumn(StatementRefused):
    """A statement names a column that does not exist."""


class ValueRefused(StatementRefused):
    """PostgreSQL cannot compute or store a value of a statement."""


class InUse(StatementRefused):
    """Another transaction, or an object that depends on it, uses what a statement changes.

    Also: another transaction has changed it, and committed first.
    """


class SourceError(EverstateError):
    """A source of truth refused a request for a reason that does not pass by waiting."""


class LocalStackError(EverstateError):
    """A server of the local stack did not start, or stopped; names its log file."""

    exit_code = 6


class Fenced(EverstateError):
    """Another process took over this role; this one must stop."""

    exit_code = 7


class RoleEnded(EverstateError):
    """A role of `everstate run` ended for a reason that a restart does not remove.

    ``code`` is the role's exit code, and that of `everstate run`.
    """

    def __init__(self, role: str, code: int, said: str, log: str) -> None:
        self.role, self.code, self.exit_code = role, code, code
        super().__init__(f"{role} ended: {said}", advice=f"Its log is {log}.")
