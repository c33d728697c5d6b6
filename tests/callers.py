"""Callers with tokens, for the tests of the API."""

from __future__ import annotations

from datetime import datetime

from everstate.api_config import ClaimsConfig, Right, TokenConfig
from everstate.http.tokens import hash_of

EVERYTHING: dict[str, tuple[Right, ...]] = {"*": ("read", "write", "operate", "unmasked")}


def caller_entry(
    token: str,
    service: str = "desk",
    identifier: str = "clerk-7",
    *,
    permissions: dict[str, tuple[Right, ...]] | None = None,
    expires: datetime | None = None,
    claims: ClaimsConfig | None = None,
) -> TokenConfig:
    """A table of `[api.tokens]` for a token; it may do everything if nothing else is given."""
    return TokenConfig(
        token_hash=hash_of(token),
        service=service,
        identifier=identifier,
        permissions=EVERYTHING if permissions is None else permissions,
        expires=expires,
        claims=claims or ClaimsConfig(),
    )
