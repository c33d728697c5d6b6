"""Requests and answers, independent of any web framework. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
from werkzeug.http import parse_etags, parse_options_header

from everstate.errors import InvalidQuery, InvalidRequest, RequestTooLarge, UnsupportedMediaType
from everstate.http.callers import WAIT_FOR, Caller, idempotency_key_of, text
from everstate.http.etags import Conditions, parse_condition
from everstate.http.masks import NO_MASK, Mask

JSON = "application/json"
Parameters = Mapping[str, str]
"""Parameters of a query, each given once."""


_TOKEN_MAX = 4096


@dataclass(frozen=True)
class HttpRequest:
    """A request; header names are lower case, values are as in ASGI (latin-1)."""

    method: str
    path: str
    headers: Mapping[str, str]
    caller: Caller
    body: bytes = b""
    mask: Mask = NO_MASK
    """What the caller does not see of the entity type that the request is about."""
    sent_path: bytes = b""
    """The path as it was sent: decoded, a slash within a part is one between two."""

    @cached_property
    def conditions(self) -> Conditions:
        """The request's conditions on the present version; raises InvalidRequest."""
        given, tag = self.headers.get, self.mask.tag
        return Conditions(
            parse_condition("If-Match", given("if-match"), tag),
            parse_condition("If-None-Match", given("if-none-match"), tag),
        )

    @cached_property
    def idempotency_key(self) -> str | None:
        """Its Idempotency-Key; raises InvalidRequest."""
        return idempotency_key_of(self.headers)

    @property
    def wait_for(self) -> str | None:
        """The token that the answer must cover; raises InvalidRequest."""
        return text(self.headers, WAIT_FOR, _TOKEN_MAX)

    @property
    def once_id(self) -> str:
        """Id of the request, unique among all callers: caller and Idempotency-Key."""
        caller = self.caller
        return _digest(str(caller.service), str(caller.identifier), str(self.idempotency_key))

    @property
    def fingerprint(self) -> str:
        """Hash that distinguishes the request from others: method, path, conditions and body."""
        names = ("content-type", "if-match", "if-none-match")
        said = (self.headers.get(name, "") for name in names)
        return _digest(self.method, self.path, *said, self.body)


class HttpAnswer(msgspec.Struct, frozen=True):
    """The answer to a request; ``body`` is JSON text, ``None``: there is none."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: str | None = None

    def kept(self) -> str:
        """The text that :class:`~everstate.sources.stores.store.Once` keeps."""
        return msgspec.json.encode(self).decode()


def masked(answer: HttpAnswer, mask: Mask) -> HttpAnswer:
    """The answer with a state, for a caller who does not see all of it: with its own ETag."""
    if not mask:
        return answer
    headers = dict(answer.headers)
    if "ETag" in headers:
        headers["ETag"] = f'{headers["ETag"][:-1]}.{mask.tag}"'
    body = None if answer.body is None else mask.json(answer.body.encode()).decode()
    return HttpAnswer(answer.status, headers, body)


def tagged(incoming: HttpRequest, headers: Mapping[str, str], body: str) -> HttpAnswer:
    """An answer whose ETag is a hash of its body; 304 when the reader has the same already."""
    tag = hashlib.blake2b(body.encode(), digest_size=16).hexdigest()
    answered = {**headers, "ETag": f'"{tag}"'}
    has_condition = incoming.conditions.none_match is not None
    if has_condition and parse_etags(incoming.headers["if-none-match"]).contains_weak(tag):
        return HttpAnswer(304, answered)
    return HttpAnswer(200, answered, body)


read_kept = msgspec.json.Decoder(HttpAnswer).decode


def content_type_of(headers: Mapping[str, str], accepted: tuple[str, ...]) -> str:
    """The content type of the body; raises UnsupportedMediaType if it is not accepted."""
    declared = headers.get("content-type", "")
    name, parameters = parse_options_header(declared)
    is_utf8 = parameters.get("charset", "utf-8").lower() in ("utf-8", "utf8")
    if name.lower() not in accepted or not is_utf8:
        raise UnsupportedMediaType(declared, accepted)
    return name.lower()


def whole_number(
    given: Parameters, name: str, expected: str, *, least: int = 0, most: int = 2**63 - 1
) -> int:
    """A parameter that is a whole number; raises InvalidQuery, which says what is ``expected``."""
    text = given.get(name, "")
    # One with thousands of digits is not read.
    if text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most:
        return int(text)
    raise InvalidQuery(f"{name} is {text!r}; expected {expected}.")


def check_length(headers: Mapping[str, str], limit: int) -> None:
    """Raise RequestTooLarge, before the body is read, when its Content-Length is too large."""
    declared = headers.get("content-length", "0")
    if not (declared.isascii() and declared.isdigit()):
        raise InvalidRequest(f"Content-Length is {declared!r}; expected a number.")
    if int(declared.lstrip("0")[:20] or 0) > limit:
        raise RequestTooLarge(limit)


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        encoded = part if isinstance(part, bytes) else part.encode("utf-8", "surrogateescape")
        digest.update(b"%d:" % len(encoded))
        digest.update(encoded)
    return digest.hexdigest()
