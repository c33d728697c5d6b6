"""The answer that the sender of a command gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from everstate.errors import (
    CommandParked,
    CommandTimedOut,
    EverstateError,
    Rejected,
    VersionConflict,
)
from everstate.sources.commands.wire import AnsweredChange, Outcome, WireAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Outcome of a command; the same for the same command id, however often it is sent.

    ``version`` is the entity's version after the decision (0: it never existed); ``None`` when
    no answer came in time.
    """

    outcome: Outcome
    command_id: UUID
    entity: str
    key: str
    version: int | None = None
    changes: Sequence[AnsweredChange] = ()
    expected_version: int | None = None
    reason: str | None = None
    """Reason of a rejection, or why the command is parked."""
    code: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None

    @property
    def accepted(self) -> bool:
        """Whether the command was accepted."""
        return self.outcome is Outcome.ACCEPTED

    def or_raise(self) -> Answer:
        """Return this answer when it is an acceptance.

        Raises Rejected, VersionConflict, CommandParked or CommandTimedOut.
        """
        error = self.error()
        if error is not None:
            raise error
        return self

    def error(self) -> EverstateError | None:
        """The answer as an error; ``None``: it is an acceptance."""
        where = (self.entity, self.key)
        if self.outcome is Outcome.REJECTED:
            return Rejected(self.reason or "", code=self.code, **self.data)
        if self.outcome is Outcome.CONFLICT:
            return VersionConflict(*where, self.expected_version or 0, self.version or 0)
        if self.outcome is Outcome.PARKED:
            return CommandParked(*where, str(self.command_id), self.reason or "")
        if self.outcome is Outcome.TIMED_OUT:
            return CommandTimedOut(*where, str(self.command_id), self.timeout_s or 0.0)
        return None


def answer_of(wire: WireAnswer) -> Answer:
    """The answer in a record of the log."""
    return Answer(
        outcome=wire.outcome,
        command_id=wire.id,
        entity=wire.entity,
        key=wire.key,
        version=wire.version,
        changes=wire.changes,
        expected_version=wire.expected_version,
        reason=wire.reason,
        code=wire.code,
        data=wire.data or {},
    )
