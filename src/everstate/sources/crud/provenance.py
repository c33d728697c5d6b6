"""Who calls, and the provenance of what a request writes."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from everstate.changes import Provenance
from everstate.changes.moments import moment_fault
from everstate.config import ApiConfig
from everstate.errors import InvalidRequest, MissingProvenance, Unauthenticated

SERVICE: Final = "Everstate-Service"
IDENTIFIER: Final = "Everstate-Identifier"
ACTOR: Final = "Everstate-Actor"
REASON: Final = "Everstate-Reason"
CORRELATION: Final = "Everstate-Correlation-Id"
CAUSATION: Final = "Everstate-Causation-Id"
OCCURRED_AT: Final = "Everstate-Occurred-At"
_TEXT_MAX: Final = 500
_KEY_MAX: Final = 255


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: from the token, or in local mode from headers (``None``: it did not say)."""

    service: str | None
    identifier: str | None


class Callers:
    """The callers of `[api.tokens]`; without any, headers name the caller (local mode)."""

    def __init__(self, config: ApiConfig) -> None:
        self._callers = [
            (_digest(entry.token.get_secret_value()), Caller(entry.service, entry.identifier))
            for entry in config.tokens.values()
        ]

    @property
    def local(self) -> bool:
        """Whether callers name themselves."""
        return not self._callers

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """The caller of a request; raises Unauthenticated when its token is none of ours.

        Every token is compared, in a time that does not depend on how much of it is right.
        """
        if self.local:
            return Caller(text(headers, SERVICE), text(headers, IDENTIFIER))
        scheme, _, given = headers.get("authorization", "").partition(" ")
        digest, found = _digest(given.strip()), None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None or scheme.lower() != "bearer":
            raise Unauthenticated(
                "the request has no token that is known here.",
                advice="Send `Authorization: Bearer <token>` with a token of [api.tokens].",
            )
        return found


def provenance_of(
    headers: Mapping[str, str], caller: Caller, *, api_version: str, entity: str, key: str | None
) -> Provenance:
    """Provenance of a write; raises MissingProvenance naming the header when it is not whole."""
    if not caller.service:
        raise MissingProvenance(entity, key, SERVICE)
    if not caller.identifier:
        raise MissingProvenance(entity, key, IDENTIFIER)
    return Provenance(
        api_version=api_version,
        service_name=caller.service,
        identifier=caller.identifier,
        actor=text(headers, ACTOR),
        reason=text(headers, REASON),
        correlation_id=text(headers, CORRELATION),
        causation_id=text(headers, CAUSATION),
    )


def occurred_at_of(headers: Mapping[str, str]) -> datetime | None:
    """When it happened in the world, if the request says so; raises InvalidRequest."""
    value = text(headers, OCCURRED_AT)
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError as cause:
        raise InvalidRequest(f"{OCCURRED_AT} is {value!r}; expected RFC 3339.") from cause
    if fault := moment_fault(moment):
        raise InvalidRequest(f"{OCCURRED_AT} is {value!r}: {fault}.")
    return moment


def idempotency_key_of(headers: Mapping[str, str]) -> str | None:
    """The Idempotency-Key, with or without its quotes; raises InvalidRequest."""
    value = text(headers, "Idempotency-Key", _KEY_MAX)
    if value is None:
        return None
    key = value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value
    if not key:
        raise InvalidRequest("Idempotency-Key is empty; expected a text of your own, a UUID say.")
    return key


def text(headers: Mapping[str, str], name: str, length_max: int = _TEXT_MAX) -> str | None:
    """A header as UTF-8 text; ``None``: it is missing.

    Raises InvalidRequest when it is empty, too long, or no text.
    """
    value = headers.get(name.lower())
    if value is None:
        return None
    if not value.strip():
        raise InvalidRequest(f"{name} is empty; leave it out, or say something.")
    try:
        # ASGI servers decode bytes one by one; what came is UTF-8 to us.
        decoded = value.encode("latin-1").decode()
    except UnicodeError as cause:
        raise InvalidRequest(f"{name} is no UTF-8 text.") from cause
    if len(decoded) > length_max:
        raise InvalidRequest(f"{name} is longer than {length_max} characters.")
    if not decoded.isprintable():
        raise InvalidRequest(f"{name} has control characters.")
    return decoded


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
