"""Callers of the API, and the provenance of their writes."""

from __future__ import annotations

import hmac
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Final, Literal

from everstate.api_config import ApiConfig, Right, TokenConfig
from everstate.changes import Provenance
from everstate.changes.moments import moment_fault, moment_of
from everstate.errors import InvalidRequest, MissingProvenance, NotPermitted, Unauthenticated
from everstate.http.masks import ALL_FIELDS, NO_MASK, Mask
from everstate.http.tokens import hash_of

SERVICE: Final = "Everstate-Service"
IDENTIFIER: Final = "Everstate-Identifier"
ACTOR: Final = "Everstate-Actor"
REASON: Final = "Everstate-Reason"
CORRELATION: Final = "Everstate-Correlation-Id"
CAUSATION: Final = "Everstate-Causation-Id"
OCCURRED_AT: Final = "Everstate-Occurred-At"
TOKEN: Final = "Everstate-Token"
"""Response header of a write; a reader of the views that sends this token sees the write."""
WAIT_FOR: Final = "Everstate-Wait-For"
EVERY: Final = "*"
"""Means every entity type, in permissions and where a page shows all of them."""
CallerClaim = Literal["service", "identifier", "actor"]
_TEXT_MAX: Final = 500
_KEY_MAX: Final = 255


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller: from the token, or in local mode from headers (``None``: not given)."""

    service: str | None
    identifier: str | None
    name: str | None = None
    """Of its table in `[api.tokens]`; ``None``: local mode, in which it may do everything."""
    token: TokenConfig | None = field(default=None, repr=False)
    masked: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    """Fields by entity type: `api.masks` and `api.former_masks`."""

    @property
    def expires(self) -> datetime | None:
        """When its token stops being valid; ``None``: never."""
        return None if self.token is None else self.token.expires

    def may(self, entity: str, right: Right) -> bool:
        """Whether the caller has a right on an entity type; :data:`EVERY`: on each of them."""
        if self.token is None:
            return True
        given = self.token.permissions
        if entity == EVERY:
            return EVERY in given and all(right in rights for rights in given.values())
        return right in given.get(entity, given.get(EVERY, ()))

    def require(self, entity: str, right: Right) -> None:
        """Raise NotPermitted when the caller does not have a right on an entity type."""
        if not self.may(entity, right):
            where = "every entity type" if entity == EVERY else entity
            raise NotPermitted(self.name, f"`{right}` on {where}")

    def mask(self, entity: str) -> Mask:
        """What the caller does not see of an entity type: who may only write it sees nothing."""
        if not self.may(entity, "read"):
            return Mask(entity, (ALL_FIELDS,), self.name, "read")
        if self.may(entity, "unmasked"):
            return NO_MASK
        return Mask(entity, self.masked.get(entity, ()), self.name)

    def claimed(self, what: CallerClaim, own: str | None, claimed: str | None) -> str | None:
        """What a caller says of itself in provenance; raises NotPermitted when it may not.

        ``own``: what it is when it says nothing.
        """
        if claimed is None or claimed == own or self.token is None:
            return own if claimed is None else claimed
        allowed: tuple[str, ...] = getattr(self.token.claims, f"{what}s")
        if not any(fnmatchcase(claimed, pattern) for pattern in allowed):
            raise NotPermitted(self.name, f"the claim of {what} {claimed!r}")
        return claimed


class Callers:
    """The callers in `[api.tokens]`; without any, headers name the caller (local mode)."""

    def __init__(
        self, config: ApiConfig, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._now = now
        masked = {entity: config.masked(entity) for entity in {*config.masks, *config.former_masks}}
        self._callers = [
            (
                bytes.fromhex(entry.token_hash),
                Caller(entry.service, entry.identifier, name, entry, masked),
            )
            for name, entry in config.tokens.items()
        ]

    @property
    def local(self) -> bool:
        """Whether callers name themselves in headers (local mode)."""
        return not self._callers

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """The caller of a request; raises Unauthenticated when its token is unknown or expired.

        Compares with every token in constant time.
        """
        if self.local:
            return Caller(text(headers, SERVICE), text(headers, IDENTIFIER))
        scheme, _, given = headers.get("authorization", "").partition(" ")
        digest, found = bytes.fromhex(hash_of(given.strip())), None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None or found.token is None or scheme.lower() != "bearer":
            raise Unauthenticated(
                "the request has no valid token.",
                advice="Send `Authorization: Bearer <token>` with a token of [api.tokens].",
            )
        expires = found.expires
        if expires is not None and self._now() >= expires:
            raise Unauthenticated(
                f"the token of {found.name} expired at {expires.isoformat()}.",
                advice="Ask the operator of this server for a new one.",
            )
        return found


def provenance_of(
    headers: Mapping[str, str], caller: Caller, *, api_version: str, entity: str, key: str | None
) -> Provenance:
    """Provenance of a write.

    Raises MissingProvenance naming a missing header, and NotPermitted for a claim in a header that
    the caller may not make.
    """
    service = caller.claimed("service", caller.service, text(headers, SERVICE))
    identifier = caller.claimed("identifier", caller.identifier, text(headers, IDENTIFIER))
    if not service:
        raise MissingProvenance(entity, key, SERVICE)
    if not identifier:
        raise MissingProvenance(entity, key, IDENTIFIER)
    return Provenance(
        api_version=api_version,
        service_name=service,
        identifier=identifier,
        actor=caller.claimed("actor", None, text(headers, ACTOR)),
        reason=text(headers, REASON),
        correlation_id=text(headers, CORRELATION),
        causation_id=text(headers, CAUSATION),
    )


def occurred_at_of(headers: Mapping[str, str]) -> datetime | None:
    """When the change happened, from its header; ``None`` without one; raises InvalidRequest."""
    value = text(headers, OCCURRED_AT)
    if value is None:
        return None
    try:
        moment = moment_of(value)
    except ValueError as cause:
        raise InvalidRequest(f"{OCCURRED_AT} is {value!r}: {cause}.") from cause
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
        raise InvalidRequest("Idempotency-Key is empty; expected a unique text, such as a UUID.")
    return key


def text(headers: Mapping[str, str], name: str, length_max: int = _TEXT_MAX) -> str | None:
    """A header as UTF-8 text; ``None``: it is missing.

    Raises InvalidRequest when it is empty, too long, or not valid text.
    """
    value = headers.get(name.lower())
    if value is None:
        return None
    if not value.strip():
        raise InvalidRequest(f"{name} is empty; give it a value, or leave it out.")
    try:
        # ASGI servers decode headers as latin-1; everstate reads them as UTF-8.
        decoded = value.encode("latin-1").decode()
    except UnicodeError as cause:
        raise InvalidRequest(f"{name} is not UTF-8 text.") from cause
    if len(decoded) > length_max:
        raise InvalidRequest(f"{name} is longer than {length_max} characters.")
    if any(unicodedata.category(each) == "Cc" for each in decoded):
        raise InvalidRequest(f"{name} has control characters.")
    return decoded
