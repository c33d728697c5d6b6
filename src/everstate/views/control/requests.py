"""What verbs ask of a running pipeline, which has the one Spark session, and its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg import sql
from psycopg.types.json import Jsonb

from everstate.views.control.schema import Schema


@dataclass(frozen=True, slots=True)
class Request:
    """Something that was asked; ``state`` is asked, taken, done, failed or cancelled."""

    id: UUID
    verb: str
    arguments: Mapping[str, Any]
    state: str
    answer: Mapping[str, Any] | None


class Requests(Schema):
    """The table of requests."""

    def ask(self, verb: str, arguments: Mapping[str, Any]) -> UUID:
        """Ask the pipeline for something."""
        query = sql.SQL("INSERT INTO {} (verb, arguments) VALUES (%s, %s) RETURNING id")
        row = self.connection.execute(
            query.format(self.table("request")), (verb, Jsonb(dict(arguments)))
        ).fetchone()
        assert row is not None
        found: UUID = row[0]
        return found

    def request(self, id_: UUID) -> Request | None:
        """How a request stands."""
        query = sql.SQL("SELECT id, verb, arguments, state, answer FROM {} WHERE id = %s")
        row = self.connection.execute(query.format(self.table("request")), (id_,)).fetchone()
        return None if row is None else Request(*row)

    def take_request(self) -> Request | None:
        """The oldest request that nobody has taken; it is the caller's from here on."""
        query = sql.SQL(
            "UPDATE {0} SET state = 'taken', changed_at = now() WHERE id = ("
            "SELECT id FROM {0} WHERE state = 'asked' ORDER BY asked_at "
            "LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING id, verb, arguments, state, answer"
        ).format(self.table("request"))
        row = self.connection.execute(query).fetchone()
        return None if row is None else Request(*row)

    def ask_again(self) -> None:
        """Give back what a pipeline took that is gone."""
        query = sql.SQL("UPDATE {} SET state = 'asked', answer = NULL WHERE state = 'taken'")
        self.connection.execute(query.format(self.table("request")))

    def answer(self, id_: UUID, state: str, answer: Mapping[str, Any]) -> bool:
        """Note progress or the end of a request; false when it was cancelled meanwhile."""
        query = sql.SQL(
            "UPDATE {} SET state = %s, answer = %s, changed_at = now() "
            "WHERE id = %s AND state = 'taken'"
        ).format(self.table("request"))
        values = (state, Jsonb(dict(answer)), id_)
        return self.connection.execute(query, values).rowcount == 1

    def cancel_request(self, id_: UUID) -> bool:
        """Take a request back; false when it has ended."""
        query = sql.SQL(
            "UPDATE {} SET state = 'cancelled', changed_at = now() "
            "WHERE id = %s AND state IN ('asked', 'taken')"
        ).format(self.table("request"))
        return self.connection.execute(query, (id_,)).rowcount == 1

    def forget_requests(self, hours: float) -> None:
        """Drop requests that ended so long ago."""
        query = sql.SQL(
            "DELETE FROM {} WHERE state IN ('done', 'failed', 'cancelled') "
            "AND changed_at < now() - make_interval(secs => %s)"
        ).format(self.table("request"))
        self.connection.execute(query, (hours * 3600,))
