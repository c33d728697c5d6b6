"""Decides one command against one entity: its changes, and the answer. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

import msgspec
from pydantic import BaseModel, ValidationError

from everstate.changes import (
    Change,
    ChangeCodec,
    DomainEvent,
    Kind,
    SourceTransaction,
    derived_change_id,
)
from everstate.changes.accepting import read_exactly
from everstate.changes.names import command_fault
from everstate.changes.values import model_json
from everstate.declarations.commands import CommandGroup, facts_of
from everstate.errors import (
    EverstateError,
    InvalidRequest,
    PreconditionFailed,
    Rejected,
)
from everstate.errors.base import described
from everstate.http.etags import Conditions, parse_condition
from everstate.sources.commands.store import NEVER
from everstate.sources.commands.wire import (
    AnsweredChange,
    Outcome,
    WireAnswer,
    WireCommand,
    encode,
    provenance_of,
)

REASON_MAX: Final = 2_000
BLOCK: Final = "command:"
"""Before the id of a command, in the id of the block of its changes."""
_ANSWER_ROOM: Final = 4_096

EncodedRecord = tuple[bytes, bytes, Any]
"""Key, value and headers of a record."""


class RememberedEntity(NamedTuple):
    """An entity in its handler's memory; ``text`` is its state as JSON, with the log's bytes.

    Version 0: it never existed. State ``None``: it does not exist, or was deleted.
    """

    version: int
    state: BaseModel | None
    text: bytes | None
    recorded_at: datetime = NEVER
    """Of its newest change; the next one is not recorded before it, whatever a clock says."""


NOTHING: Final = RememberedEntity(0, None, None)


class Decided(NamedTuple):
    """Result of a command; ``parked`` is the reason why it could not be decided."""

    held: RememberedEntity
    changes: Sequence[EncodedRecord]
    outcome: Outcome
    answer: bytes
    parked: str | None = None


class Decider:
    """Decides the commands of one entity type."""

    def __init__(
        self, group: CommandGroup, *, message_bytes_max: int, ahead_hours: float | None = None
    ) -> None:
        self.group = group
        self._codec = ChangeCodec(
            group.entity_type, message_bytes_max=message_bytes_max, ahead_hours=ahead_hours
        )
        self._schema_version = group.entity_type.schema_version
        self._change_source = f"command:{group.name}"
        self._message_bytes_max = message_bytes_max

    def decide(
        self, held: RememberedEntity, command: WireCommand, recorded_at: datetime
    ) -> Decided:
        """The result of a command: all of its changes, or none.

        Any error of the project's functions other than Rejected parks the command: its sender
        gets that answer, the entity stays as it is, and later commands are decided.
        """
        try:
            return self._decided(held, command, recorded_at)
        except BaseException as cause:
            # The project's own code: any error of it parks only this command, `sys.exit` too.
            return self.park(held, command, described(cause))

    def _decided(
        self, held: RememberedEntity, command: WireCommand, recorded_at: datetime
    ) -> Decided:
        expected = command.expected_version
        if expected is not None and expected != held.version:
            return self._answer(held, command, Outcome.CONFLICT, expected_version=expected)
        try:
            _check_condition(held, command)
        except PreconditionFailed:
            return self._answer(held, command, Outcome.CONFLICT)
        except InvalidRequest as error:
            return self.park(held, command, error.message)
        model = self.group.by_name.get(command.command)
        if model is None:
            return self.park(held, command, f"{self.group.name} takes no {command.command!r}")
        if fault := command_fault(model):
            return self.park(held, command, f"{command.command}: {fault}")
        try:
            asked = read_exactly(model, bytes(command.data))
        except ValidationError as cause:
            first = cause.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "data"
            return self.park(held, command, f"{command.command}: {where}: {first['msg']}")
        try:
            decided = self.group.decide(held.state, asked)
            if not isinstance(decided, Rejected):
                return self._apply(held, command, tuple(facts_of(decided)), recorded_at)
        except Rejected as refusal:
            decided = refusal
        return self._rejected(held, command, decided)

    def park(self, held: RememberedEntity, command: WireCommand, reason: str) -> Decided:
        """The answer to a command that cannot be decided."""
        reason = reason[:REASON_MAX]
        parked = self._answer(held, command, Outcome.PARKED, reason=reason)
        return parked._replace(parked=reason)

    def discard(self, held: RememberedEntity, command: WireCommand) -> Decided:
        """The answer to a parked command that was discarded."""
        return self._answer(
            held, command, Outcome.REJECTED, reason="discarded while parked", code="discarded"
        )

    def _apply(
        self,
        held: RememberedEntity,
        command: WireCommand,
        facts: Sequence[Any],
        recorded_at: datetime,
    ) -> Decided:
        """One change for each fact, in one transaction block of the command."""
        source, command_id = provenance_of(bytes(command.provenance)), str(command.id)
        block_id, entity = f"{BLOCK}{command_id}", self._change_source
        version, state, text, newest = held
        recorded_at = max(recorded_at, newest)
        changes, answered = [], []
        for index, fact in enumerate(facts, 1):
            before, version = text, version + 1
            state = self.group.evolve(state, fact)
            text = None if state is None else self._text(state, command.key, before)
            if text is None and before is None:
                raise ValueError("evolve returned no state for an entity that does not exist")
            data = model_json(fact)
            change: Change[bytes] = Change(
                id=derived_change_id(entity, command_id, index),
                entity=command.entity,
                schema_version=self._schema_version,
                key=command.key,
                version=version,
                kind=Kind.between(before, text),
                occurred_at=command.occurred_at,
                recorded_at=recorded_at,
                provenance=source,
                current=text,
                original=before,
                event=DomainEvent(type=fact.__class__.__name__, data=msgspec.Raw(data)),
                transaction=SourceTransaction(id=block_id, index=index, count=len(facts)),
            )
            changes.append(self._codec.encode(change))
            answered.append(
                AnsweredChange(
                    id=change.id,
                    version=version,
                    kind=change.kind.value,
                    type=fact.__class__.__name__,
                    data=msgspec.Raw(data),
                )
            )
        after = RememberedEntity(version, state, text, recorded_at)
        return self._answer(after, command, Outcome.ACCEPTED, changes, changes=tuple(answered))

    def _text(self, state: Any, key: str, before: bytes | None) -> bytes:
        entity_type = self.group.entity_type
        if state.__class__ is not entity_type.model:
            raise TypeError(
                f"evolve returned {type(state).__name__}, not {entity_type.model.__name__}"
            )
        found = entity_type.key_of(state)
        if found != key:
            raise ValueError(f"evolve returned the state of {found!r}")
        text = entity_type.encode(state)
        return text if before is None else entity_type.carry(key, before, text)

    def _rejected(self, held: RememberedEntity, command: WireCommand, refusal: Rejected) -> Decided:
        return self._answer(
            held,
            command,
            Outcome.REJECTED,
            reason=refusal.reason[:REASON_MAX],
            code=refusal.code,
            data=refusal.data or None,
        )

    def _answer(
        self,
        held: RememberedEntity,
        command: WireCommand,
        outcome: Outcome,
        records: Sequence[EncodedRecord] = (),
        **more: Any,
    ) -> Decided:
        wire_answer = WireAnswer(
            id=command.id,
            entity=command.entity,
            key=command.key,
            outcome=outcome,
            version=held.version,
            fingerprint=command.fingerprint,
            **more,
        )
        return Decided(held, records, outcome, answer_json(wire_answer, self._message_bytes_max))


def answer_json(wire_answer: WireAnswer, message_bytes_max: int) -> bytes:
    """An answer as written, without its data if that is too large; raises ValueError."""
    at_most = message_bytes_max - _ANSWER_ROOM
    try:
        answer = encode(wire_answer)
    except (TypeError, ValueError, EverstateError):
        # The rejection has data that JSON cannot hold.
        unreadable = {"unreadable": repr(wire_answer.data)}
        answer = encode(msgspec.structs.replace(wire_answer, data=unreadable))
    if len(answer) > at_most:
        without = [msgspec.structs.replace(each, data=None) for each in wire_answer.changes]
        answer = encode(msgspec.structs.replace(wire_answer, changes=without, data=None))
    if len(answer) > at_most:
        raise ValueError(
            f"its answer has {len(answer):,} bytes without any data, and at most"
            f" {at_most:,} are possible (log.message_bytes_max)"
        )
    return answer


def _check_condition(held: RememberedEntity, command: WireCommand) -> None:
    """Raise PreconditionFailed when the command's condition does not hold."""
    if command.if_match is not None:
        conditions = Conditions(match=parse_condition("If-Match", command.if_match))
        present = None if held.text is None else held.version
        conditions.check(command.entity, command.key, present)
