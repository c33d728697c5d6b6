"""Requests of commands to a running pipeline, which has the Spark session, and its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from psycopg import sql
from psycopg.types.json import Jsonb

from everstate.views.control.schema import Schema

RECOMPUTE: Final = "recompute"
"""Verb of a request for proofs: ``names`` (``None``: all views), ``promote``."""
QUERY: Final = "query"
"""Verb of a request for a past view: ``view``, and the ``moment``."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request; its ``state`` is asked, taken, done, failed or cancelled."""

    id: UUID
    verb: str
    arguments: Mapping[str, Any]
    state: str
    answer: Mapping[str, Any] | None


class Requests(Schema):
    """The table of requests."""

    def ask(self, verb: str, arguments: Mapping[str, Any]) -> UUID:
        """Add a request to the pipeline; returns its id."""
        query = sql.SQL("INSERT INTO {} (verb, arguments) VALUES (%s, %s) RETURNING id")
        row = self.connection.execute(
            query.format(self.table("request")), (verb, Jsonb(dict(arguments)))
        ).fetchone()
        assert row is not None
        found: UUID = row[0]
        return found

    def request(self, id_: UUID) -> Request | None:
        """A request with its present state and answer; ``None``: it does not exist."""
        query = sql.SQL("SELECT id, verb, arguments, state, answer FROM {} WHERE id = %s")
        row = self.connection.execute(query.format(self.table("request")), (id_,)).fetchone()
        return None if row is None else Request(*row)

    def take_request(self) -> Request | None:
        """Take the oldest untaken request; ``None``: there is none."""
        query = sql.SQL(
            "UPDATE {0} SET state = 'taken', changed_at = now() WHERE id = ("
            "SELECT id FROM {0} WHERE state = 'asked' ORDER BY asked_at "
            "LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING id, verb, arguments, state, answer"
        ).format(self.table("request"))
        row = self.connection.execute(query).fetchone()
        return None if row is None else Request(*row)

    def ask_again(self) -> None:
        """Return the requests that an ended pipeline had taken to the state ``asked``."""
        query = sql.SQL("UPDATE {} SET state = 'asked', answer = NULL WHERE state = 'taken'")
        self.connection.execute(query.format(self.table("request")))

    def answer(self, id_: UUID, state: str, answer: Mapping[str, Any]) -> bool:
        """Store the progress or the end of a request; false when it was cancelled meanwhile."""
        query = sql.SQL(
            "UPDATE {} SET state = %s, answer = %s, changed_at = now() "
            "WHERE id = %s AND state = 'taken'"
        ).format(self.table("request"))
        values = (state, Jsonb(dict(answer)), id_)
        return self.connection.execute(query, values).rowcount == 1

    def cancel_request(self, id_: UUID) -> bool:
        """Cancel a request; false when it has ended."""
        query = sql.SQL(
            "UPDATE {} SET state = 'cancelled', changed_at = now() "
            "WHERE id = %s AND state IN ('asked', 'taken')"
        ).format(self.table("request"))
        return self.connection.execute(query, (id_,)).rowcount == 1

    def forget_requests(self, hours: float) -> None:
        """Delete requests that ended more than so many hours ago."""
        query = sql.SQL(
            "DELETE FROM {} WHERE state IN ('done', 'failed', 'cancelled') "
            "AND changed_at < now() - make_interval(secs => %s)"
        ).format(self.table("request"))
        self.connection.execute(query, (hours * 3600,))
