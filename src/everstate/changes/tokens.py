"""Tokens: one opaque text that records how far the log was read, or what was written.

A token holds *positions* (for an entity type, the next offset in each partition of its log) and
*claims* (a version of an entity, which a writer knows before its change is in the log). A reader
that gets a token waits until a view has caught up with it, or resumes reading after it. Clients
must not parse the text: its first letters are the version of its format, which may change.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, time, timedelta
from typing import Final, NamedTuple, TypeAlias
from zlib import crc32

import msgspec

from everstate.changes.moments import moment_of
from everstate.errors import InvalidToken

_FORM: Final = "e1."
_DAYS: Final = ("today", "yesterday")
_CHECK_BYTES: Final = 4
_LOG_BYTES: Final = 8

Partition: TypeAlias = tuple[int, int]
"""Generation of the changelog, and partition."""


class Spot(NamedTuple):
    """How far one partition was read.

    ``done``: number of changes taking effect at ``next_offset`` itself that were read already. A
    change that fills a gap in the versions lets later ones take effect at its own offset, and a
    reader may stop between them.
    """

    next_offset: int
    done: int = 0

    @property
    def covered_by(self) -> int:
        """The lowest position at which a view has applied everything before this spot."""
        return self.next_offset + (1 if self.done else 0)


@dataclass(frozen=True, slots=True)
class LogPosition:
    """How far the changelog of one entity type was read."""

    log: bytes
    """Which log, see :func:`log_mark`."""
    spots: Mapping[Partition, Spot]


@dataclass(frozen=True, slots=True)
class Claim:
    """A version of an entity that was written."""

    entity: str
    key: str
    version: int


@dataclass(frozen=True, slots=True)
class Token:
    """The contents of a token; ``str`` gives its opaque text."""

    positions: Mapping[str, LogPosition] = field(default_factory=dict)
    """By entity type."""
    claims: tuple[Claim, ...] = ()
    project: str | None = None
    """Name of the app whose entities the claims are about; ``None``: there are no claims."""

    def __str__(self) -> str:
        positions = {
            entity: (place.log, [(*at, *spot) for at, spot in sorted(place.spots.items())])
            for entity, place in self.positions.items()
        }
        claims = [(claim.entity, claim.key, claim.version) for claim in self.claims]
        packed = msgspec.msgpack.encode(_Wire(positions, claims, self.project))
        packed += crc32(packed).to_bytes(_CHECK_BYTES, "big")
        return _FORM + base64.urlsafe_b64encode(packed).rstrip(b"=").decode()


class _Wire(msgspec.Struct, array_like=True, frozen=True):
    positions: dict[str, tuple[bytes, list[tuple[int, int, int, int]]]]
    claims: list[tuple[str, str, int]]
    project: str | None


def parse_token(text: str) -> Token:
    """Parse a token's text; raises InvalidToken when it is no token, or is not complete."""
    stripped = text.strip()
    if not stripped.startswith(_FORM):
        raise InvalidToken("its prefix is not that of a token of this version of everstate")
    encoded = stripped.removeprefix(_FORM)
    try:
        packed = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
        body, check = packed[:-_CHECK_BYTES], packed[-_CHECK_BYTES:]
        if crc32(body).to_bytes(_CHECK_BYTES, "big") != check:
            raise InvalidToken("a part of it is missing or was changed")
        wire = msgspec.msgpack.decode(body, type=_Wire)
    except (binascii.Error, msgspec.DecodeError, ValueError) as cause:
        raise InvalidToken("a part of it is missing or was changed") from cause
    return Token(
        {
            entity: LogPosition(log, {(g, p): Spot(at, done) for g, p, at, done in spots})
            for entity, (log, spots) in wire.positions.items()
        },
        tuple(Claim(*claim) for claim in wire.claims),
        wire.project,
    )


def parse_since(text: str) -> Token | datetime | None:
    """Where a reader begins: a token, or a time; ``None``: `beginning` or `now`.

    A time is of RFC 3339, or of today or yesterday: `yesterday 18:00`. Without an offset it is one
    of this machine's time zone. Raises InvalidToken.
    """
    if text in ("beginning", "now"):
        return None
    if text.strip().startswith(_FORM):
        return parse_token(text)
    day, _, clock = text.partition(" ")
    try:
        if day not in _DAYS:
            return moment_of(text).astimezone()
        date = datetime.now().astimezone() - timedelta(days=_DAYS.index(day))
        return datetime.combine(date, time.fromisoformat(clock)).astimezone()
    except ValueError as cause:
        reason = f"{text!r} is neither a token nor a time, neither beginning nor now"
        raise InvalidToken(reason, advice="A time is `yesterday 18:00`, or of RFC 3339.") from cause


def written_token(project: str, entity: str, key: str, version: int) -> Token:
    """A token for a version that was written, before its change is in the log."""
    return Token(claims=(Claim(entity, key, version),), project=project)


def log_mark(topic: str, cluster_id: str, topic_id: str) -> bytes:
    """A hash that identifies a log: a topic deleted and created again has another one."""
    text = "\0".join((topic, cluster_id, topic_id)).encode()
    return hashlib.blake2b(text, digest_size=_LOG_BYTES).digest()
