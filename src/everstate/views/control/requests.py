"""Requests of commands to a running pipeline, which has the Spark session, and its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from psycopg.types.json import Jsonb

from everstate.views.control.schema import Schema

RECOMPUTE: Final = "recompute"
"""Verb of a request for proofs: ``names`` (``None``: all views), ``promote``."""
QUERY: Final = "query"
"""Verb of a request for a past view: ``view``, and the ``moment``."""


_COLUMNS: Final = "id, verb, arguments, state, answer"


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
        query = "INSERT INTO {request} (verb, arguments) VALUES (%s, %s) RETURNING id"
        found: UUID = self.value(query, (verb, Jsonb(dict(arguments))))
        return found

    def request(self, id_: UUID) -> Request | None:
        """A request with its present state and answer; ``None``: it does not exist."""
        row = self.run("SELECT " + _COLUMNS + " FROM {request} WHERE id = %s", (id_,)).fetchone()
        return None if row is None else Request(*row)

    def take_request(self) -> Request | None:
        """Take the oldest untaken request; ``None``: there is none."""
        row = self.run(
            "UPDATE {request} SET state = 'taken', changed_at = now() WHERE id = ("
            "SELECT id FROM {request} WHERE state = 'asked' ORDER BY asked_at "
            "LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING " + _COLUMNS
        ).fetchone()
        return None if row is None else Request(*row)

    def resume_requests(self, hours: float) -> None:
        """Return those that an ended pipeline had taken to the state ``asked``.

        Requests that ended more than so many hours ago are deleted.
        """
        self.run("UPDATE {request} SET state = 'asked', answer = NULL WHERE state = 'taken'")
        self.run(
            "DELETE FROM {request} WHERE state IN ('done', 'failed', 'cancelled') "
            "AND changed_at < now() - make_interval(secs => %s)",
            (hours * 3600,),
        )

    def answer(self, id_: UUID, state: str, answer: Mapping[str, Any]) -> bool:
        """Store the progress or the end of a request; false when it was cancelled meanwhile."""
        return self.run_one(
            "UPDATE {request} SET state = %s, answer = %s, changed_at = now() "
            "WHERE id = %s AND state = 'taken'",
            (state, Jsonb(dict(answer)), id_),
        )

    def cancel_request(self, id_: UUID) -> bool:
        """Cancel a request; false when it has ended."""
        return self.run_one(
            "UPDATE {request} SET state = 'cancelled', changed_at = now() "
            "WHERE id = %s AND state IN ('asked', 'taken')",
            (id_,),
        )
