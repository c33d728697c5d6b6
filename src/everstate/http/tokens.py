"""Tokens of callers: how they are made, and the hash that settings have of them. Pure.

A token has 256 random bits, so nobody can find it from its hash by trying: a plain SHA-256 is
enough, where a password would need a slow hash with a salt.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

PREFIX: Final = "es_"
"""First characters of a token, by which scanners of source code find one that was published."""
_BYTES: Final = 32


def new_token() -> str:
    """A new random token."""
    return PREFIX + secrets.token_urlsafe(_BYTES)


def hash_of(token: str) -> str:
    """SHA-256 of a token in hexadecimal, as in the setting ``token_hash``."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
