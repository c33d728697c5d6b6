"""Wire forms of commands and answers in the log."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, Final
from uuid import UUID

import msgspec
from pydantic import BaseModel

from everstate.changes import Provenance
from everstate.changes.depth import bounded
from everstate.changes.json_numbers import encode as encode
from everstate.changes.json_numbers import number_of
from everstate.changes.read_back import ReadBack
from everstate.changes.values import model_json

CLIENT: Final = "client"
"""Header of a command and of its answer: which client waits for it."""
REPLAY: Final = "replay"
"""Header of a replayed command: it is decided again, although it has the answer "parked"."""
DISCARD: Final = "discard"
"""Header of a discarded parked command: it is answered with a rejection, without a decision."""
OFFSET: Final = "command"
"""Header of an answer: the offset of its command."""
REASON: Final = "reason"
"""Header of a parked command: why it could not be decided."""
PLACE: Final = "place"
"""Header of a parked command: ``partition@offset`` at which it was read."""


class Outcome(StrEnum):
    """Outcome of a command."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    CONFLICT = "conflict"
    PARKED = "parked"
    """It could not be decided; it waits for a repair and a replay."""
    TIMED_OUT = "timed_out"
    """No answer came in time; the sender does not know the outcome. Never in the log."""

    __hash__ = str.__hash__


class WireCommand(msgspec.Struct, frozen=True, kw_only=True, rename="camel", gc=False):
    """A command as written to the log; data and provenance stay JSON text until needed."""

    id: UUID
    entity: str
    key: str
    command: str
    data: msgspec.Raw
    occurred_at: datetime
    provenance: msgspec.Raw
    expected_version: int | None = None
    if_match: str | None = None
    """A condition on the present entity, in the form of an If-Match header."""
    fingerprint: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    """Hash that distinguishes the request from others with the same id."""


class AnsweredChange(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", gc=False, omit_defaults=True
):
    """One change of an accepted command: its fact, and its place in the entity's history."""

    id: UUID
    version: int
    kind: str
    type: str
    data: Any = None


class WireAnswer(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", gc=False, omit_defaults=True
):
    """An answer as written.

    ``version`` is the entity's version after the decision; the expected one of a conflict is in
    ``expected_version``.
    """

    id: UUID
    entity: str
    key: str
    outcome: Outcome
    version: int
    changes: Sequence[AnsweredChange] = ()
    expected_version: int | None = None
    reason: str | None = None
    code: str | None = None
    data: Mapping[str, Any] | None = None
    fingerprint: str | None = None
    """Fingerprint of the command that was decided under this id."""


decode_command = bounded(msgspec.json.Decoder(WireCommand).decode)
decode_answer = bounded(msgspec.json.Decoder(WireAnswer, float_hook=number_of).decode)
_decode_provenance = bounded(msgspec.json.Decoder(Provenance).decode)


def command_json(command: BaseModel) -> bytes:
    """JSON of a command, as its handler reads it.

    Raises ValueError where that would be another command, and as :func:`model_json` does.
    """
    encoded = model_json(command, warns=False)
    fault = _read_back(command.__class__).fault(command, encoded)
    if fault is not None:
        raise ValueError(": ".join(fault))
    return encoded


@lru_cache(maxsize=1024)
def _read_back(model: type[BaseModel]) -> ReadBack:
    return ReadBack(model, has_columns=False)


def fingerprint_of(
    provenance: Provenance,
    command: str,
    data: bytes,
    expected_version: int | None,
    if_match: str | None,
) -> str:
    """Hash that distinguishes a request from others with its id: sender, command, conditions."""
    sender = (provenance.service_name, provenance.identifier)
    content = encode([*sender, command, msgspec.Raw(data), expected_version, if_match])
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@lru_cache(maxsize=4096)
def provenance_of(text: bytes) -> Provenance:
    """Provenance of a command; the same object for the same text, which codecs encode faster.

    Raises msgspec.DecodeError.
    """
    return _decode_provenance(text)


@lru_cache(maxsize=256)
def provenance_text(provenance: Provenance) -> msgspec.Raw:
    """Provenance in the form of a command's field."""
    return msgspec.Raw(encode(provenance))
