"""`[api]`: where the HTTP API listens, who may call it, and what each caller may do and see."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field, SecretStr, model_validator

from everstate.sections import MAY_HOLD_SECRET, Section

Right = Literal["read", "write", "operate", "unmasked"]
"""``operate``: dead letters and the console's pages on the state of the system. ``unmasked``: the
fields of ``api.masks`` and ``api.former_masks``."""


class ClaimsConfig(Section):
    """`[api.tokens.NAME.claims]`: what a caller may say of itself in the provenance of its writes.

    Each is a list of names, in which ``*`` matches any characters.
    """

    services: tuple[str, ...] = ()
    """Services other than its own."""
    identifiers: tuple[str, ...] = ()
    """Identifiers other than its own."""
    actors: tuple[str, ...] = ("*",)
    """Users or systems on whose behalf it writes."""


class TokenConfig(Section):
    """`[api.tokens.NAME]`: a caller, what it may do, and the provenance of what it writes."""

    token_hash: str = Field(pattern="^[0-9a-f]{64}$")
    """SHA-256 of the token, in hexadecimal."""
    expires: AwareDatetime | None = None
    """When the token stops being valid; ``None``: never."""
    service: str = Field(min_length=1)
    identifier: str = Field(min_length=1)
    permissions: dict[str, tuple[Right, ...]]
    """Entity type, or ``*`` for those that are not named → rights."""
    claims: ClaimsConfig = ClaimsConfig()

    @model_validator(mode="before")
    @classmethod
    def _is_hashed(cls, given: Any) -> Any:
        if isinstance(given, dict) and "token" in given:
            raise ValueError(
                "token_hash and permissions instead of token: settings have only the hash of a "
                "token, and `everstate token new NAME` makes a new one"
            )
        return given


class ApiConfig(Section):
    """`[api]`: the HTTP API of `everstate serve`."""

    host: str = "127.0.0.1"
    """Address to listen on. An address that other machines can reach needs tokens."""
    port: int = Field(default=8080, ge=0, le=65535)
    """Port to listen on. With 0, a free port is chosen."""
    ssl_certfile: Path | None = None
    """Certificate chain in PEM, relative to everstate.toml. With it, the server uses HTTPS."""
    ssl_keyfile: Path | None = None
    """Private key of the certificate in PEM, if it is not in the same file."""
    ssl_keyfile_password: Annotated[SecretStr | None, MAY_HOLD_SECRET] = None
    """Password of the private key, if it has one."""
    receive_timeout_s: float = Field(default=30, gt=0)
    """How long receiving a request, headers and body, may take. Then its connection is closed."""
    send_timeout_s: float = Field(default=60, gt=0)
    """How long a client may read nothing of its answer. Then its connection is closed."""
    connections_max: int = Field(default=1_000, ge=1)
    """Most connections at a time; further ones are closed at once."""
    tokens: Annotated[dict[str, TokenConfig], MAY_HOLD_SECRET] = Field(default_factory=dict)
    """Callers: one table ``[api.tokens.NAME]`` each, which `everstate token new NAME` prints.
    Without any, only this machine has access, and headers identify the caller."""
    masks: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Entity type → fields (dots separate nested ones) whose values only callers with the right
    ``unmasked`` see. Masks need tokens."""
    former_masks: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Entity type → fields that its model does not have any more, masked as those of ``masks``:
    older states, which histories and feeds show, still have them."""
    requests_per_s: float | None = Field(default=None, gt=0)
    """Most requests of a caller per second, over a longer time. Default: no limit."""
    requests_burst: int = Field(default=50, ge=1)
    """Most requests of a caller at once, when ``requests_per_s`` limits them."""
    audit_reads: Literal["log"] | Path | None = None
    """Where each read is recorded as a line of JSON: a file, relative to everstate.toml, or `log`
    for the logger `everstate.audit`. Default: nowhere."""
    threads: int = Field(default=16, ge=1, le=1000)
    """Number of requests that are processed at once. Each may use a connection to the store."""
    page_max: int = Field(default=500, ge=1, le=10_000)
    """Largest number of entities on one page of a list."""
    scan_rows_max: int = Field(default=10_000, ge=1)
    """Largest number of rows that are read for one page of a filtered list."""
    idempotency_keep_hours: float = Field(default=24, gt=0)
    """How long the answer to a request with an Idempotency-Key is kept."""
    event_timeout_s: float = Field(default=10, gt=0)
    """How long a POST of an event waits until Kafka acknowledged it, before it answers 503."""

    def masked(self, entity: str) -> tuple[str, ...]:
        """The fields of ``masks`` and ``former_masks``."""
        return (*self.masks.get(entity, ()), *self.former_masks.get(entity, ()))
