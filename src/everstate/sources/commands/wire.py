"""Commands and answers as they go through the log."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final
from uuid import UUID

import msgspec

from everstate.changes import Provenance

CLIENT: Final = "client"
"""Header of a command and of its answer: which client waits for it."""
REPLAY: Final = "replay"
"""Header of a command that was parked: it is decided again, its parked answer notwithstanding."""
DISCARD: Final = "discard"
"""Header of a parked command that is given up: it is answered with a rejection, undecided."""
OFFSET: Final = "command"
"""Header of an answer: the offset of its command."""
REASON: Final = "reason"
"""Header of a parked command: why it could not be decided."""
PLACE: Final = "place"
"""Header of a parked command: ``partition@offset`` at which it was read."""


class Outcome(StrEnum):
    """What became of a command."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    CONFLICT = "conflict"
    PARKED = "parked"
    """It could not be decided; it waits for a repair and a replay."""
    TIMED_OUT = "timed_out"
    """Nobody answered in time; the sender does not know. Never in the log."""

    __hash__ = str.__hash__


class WireCommand(msgspec.Struct, frozen=True, kw_only=True, rename="camel", gc=False):
    """A command as written; data and provenance stay JSON text until they are needed."""

    id: UUID
    entity: str
    key: str
    command: str
    data: msgspec.Raw
    occurred_at: datetime
    provenance: msgspec.Raw
    expected_version: int | None = None
    if_match: str | None = None
    """A condition on the entity as it is, in the form of an If-Match header."""
    fingerprint: str | None = None
    """Tells the request from others with its id."""


class AnsweredChange(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", gc=False, omit_defaults=True
):
    """One change of an accepted command: its fact, and where it is in the entity's history."""

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
    """Of the command that was decided under this id."""


encode = msgspec.json.Encoder().encode
decode_command = msgspec.json.Decoder(WireCommand).decode
decode_answer = msgspec.json.Decoder(WireAnswer).decode
_decode_provenance = msgspec.json.Decoder(Provenance).decode


def fingerprint_of(
    provenance: Provenance,
    command: str,
    data: bytes,
    expected_version: int | None,
    if_match: str | None,
) -> str:
    """Tells a request from others that have its id: who sends which command, on what condition."""
    sender = (provenance.service_name, provenance.identifier)
    told = encode([*sender, command, msgspec.Raw(data), expected_version, if_match])
    return hashlib.blake2b(told, digest_size=16).hexdigest()


@lru_cache(maxsize=4096)
def provenance_of(text: bytes) -> Provenance:
    """Provenance of a command; the same object for the same text, which codecs are quick with.

    Raises msgspec.DecodeError.
    """
    return _decode_provenance(text)


@lru_cache(maxsize=256)
def provenance_text(provenance: Provenance) -> msgspec.Raw:
    """Provenance as it goes into a command."""
    return msgspec.Raw(encode(provenance))
