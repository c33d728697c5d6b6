"""What a request says and what it is answered, without any web framework. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from everstate.errors import InvalidRequest, RequestTooLarge, UnsupportedMediaType
from everstate.sources.crud.conditions import Conditions, parse_condition
from everstate.sources.crud.provenance import Caller, idempotency_key_of

JSON = "application/json"


@dataclass(frozen=True)
class Incoming:
    """A request: header names are lower case, values as ASGI gives them (latin-1)."""

    method: str
    path: str
    headers: Mapping[str, str]
    caller: Caller
    body: bytes = b""

    @cached_property
    def conditions(self) -> Conditions:
        """What it asks of the present version; raises InvalidRequest."""
        match = parse_condition("If-Match", self.headers.get("if-match"))
        return Conditions(
            match, parse_condition("If-None-Match", self.headers.get("if-none-match"))
        )

    @cached_property
    def idempotency_key(self) -> str | None:
        """Its Idempotency-Key; raises InvalidRequest."""
        return idempotency_key_of(self.headers)

    @property
    def once_id(self) -> str:
        """Names its Idempotency-Key among those of all callers."""
        caller = self.caller
        return _digest(str(caller.service), str(caller.identifier), str(self.idempotency_key))

    @property
    def fingerprint(self) -> str:
        """Tells it from other requests: method, path, conditions and body."""
        names = ("content-type", "if-match", "if-none-match")
        said = (self.headers.get(name, "") for name in names)
        return _digest(self.method, self.path, *said, self.body)


class Answer(msgspec.Struct, frozen=True):
    """What a request is answered; ``body`` is JSON text, ``None``: there is none."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: str | None = None

    def kept(self) -> str:
        """The text that :class:`~everstate.sources.crud.store.Once` keeps."""
        return msgspec.json.encode(self).decode()


read_kept = msgspec.json.Decoder(Answer).decode


def content_type_of(headers: Mapping[str, str], accepted: tuple[str, ...]) -> str:
    """The type of the body, one of those accepted; raises UnsupportedMediaType."""
    declared = headers.get("content-type", "")
    name, *parameters = (part.strip().lower() for part in declared.split(";"))
    for parameter in parameters:
        if parameter.startswith("charset=") and parameter[8:].strip('"') not in ("utf-8", "utf8"):
            raise UnsupportedMediaType(declared, accepted)
    if name not in accepted:
        raise UnsupportedMediaType(declared, accepted)
    return name


def check_length(headers: Mapping[str, str], limit: int) -> None:
    """Raise RequestTooLarge when the body says it is too large; before it is read."""
    declared = headers.get("content-length", "0")
    if not (declared.isascii() and declared.isdigit()):
        raise InvalidRequest(f"Content-Length is {declared!r}; expected a number.")
    if int(declared[:20]) > limit:
        raise RequestTooLarge(limit)


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        encoded = part if isinstance(part, bytes) else part.encode("utf-8", "surrogateescape")
        digest.update(b"%d:" % len(encoded))
        digest.update(encoded)
    return digest.hexdigest()
