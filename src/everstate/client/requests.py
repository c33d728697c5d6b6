"""What the client sends and what it makes of answers: pure, for both clients."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import httpx
import msgspec

from everstate.changes import Provenance
from everstate.changes.json_numbers import decode
from everstate.errors import EverstateError, InvalidRequest

PAGE: Final = 100
RETRY_S: Final = 2.0
"""Pause before a subscription that was cut off is begun again."""
_VERSION_TAG: Final = re.compile(r'(?:W/)?"(\d+)\b[^"]*"')
"""An ETag with a version. A mask, or a proxy that compresses, puts a suffix behind the version."""
_ADDRESS: Final = "Make the client with the address at which `everstate serve` itself answers."


class RequestFailed(EverstateError):
    """The server answered a request with an error, or did not answer (``status`` 0)."""

    exit_code = 1

    def __init__(self, status: int, kind: str, detail: str, advice: str | None = None) -> None:
        self.status, self.kind = status, kind
        super().__init__(f"{kind}: {detail}", advice=advice)


class ClientRequest(NamedTuple):
    """One request."""

    method: str
    path: str
    query: Mapping[str, Any]
    headers: Mapping[str, str]
    content: bytes | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """An entity's state, and its version and time."""

    key: str
    state: dict[str, Any]
    version: int
    as_of: str | None
    """The world time from which the version holds, as the server wrote it."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The result of a write."""

    key: str
    version: int
    changed: bool
    """False: the state was equal to the present one, and nothing was written."""
    token: str | None
    """Pass it as ``wait_for``, and the answer includes this write."""


def place(entity: str, key: str | None = None, *below: str) -> str:
    """Path of an entity type, an entity, or what is below it.

    Raises InvalidRequest for an empty part, `.` and `..`: the path would be that of something else.
    """
    parts = [entity, *([] if key is None else [key]), *below]
    if "" in parts:
        raise InvalidRequest("an entity type, key or field is empty; expected a text.")
    return "/v1/" + "/".join(map(segment, parts))


def segment(text: str) -> str:
    """A text as a part of a path; raises InvalidRequest for `.` and `..`."""
    if text in (".", ".."):
        raise InvalidRequest(f"{text!r} cannot be part of a URL: HTTP clients remove it.")
    return quote(text, safe="")


def reading(
    path: str, wait_for: str | None, times: Mapping[str, datetime | None], **query: Any
) -> ClientRequest:
    """A question; parameters that are ``None`` are left out."""
    given = {name: value for name, value in query.items() if value is not None}
    given |= {name: value.isoformat() for name, value in times.items() if value is not None}
    return ClientRequest(
        "GET", path, given, {} if wait_for is None else {"Everstate-Wait-For": wait_for}
    )


def page_after(request: ClientRequest, after: Any) -> ClientRequest:
    """The question for the page after another one, which named this."""
    return request._replace(query={**request.query, "after": after})


def many(
    entity: str, keys: Sequence[str], at: datetime | None, wait_for: str | None
) -> ClientRequest:
    """A question for many entities by key."""
    asked = {"keys": list(keys), "at": None if at is None else at.isoformat()}
    headers = {"Content-Type": "application/json"}
    headers |= {} if wait_for is None else {"Everstate-Wait-For": wait_for}
    content = json.dumps(asked, ensure_ascii=False).encode()
    return ClientRequest("POST", f"/query{place(entity, None, 'keys')}", {}, headers, content)


def writing(
    method: str,
    path: str,
    body: Any,
    provenance: Provenance | None,
    expected_version: int | None,
    once: str | None,
) -> ClientRequest:
    """A write: ``expected_version`` 0 means that the entity must not exist."""
    headers: dict[str, str] = {}
    if provenance is not None:
        named = {
            "Everstate-Service": provenance.service_name,
            "Everstate-Identifier": provenance.identifier,
            "Everstate-Actor": provenance.actor,
            "Everstate-Reason": provenance.reason,
            "Everstate-Correlation-Id": provenance.correlation_id,
            "Everstate-Causation-Id": provenance.causation_id,
        }
        headers |= {name: value for name, value in named.items() if value is not None}
    if expected_version == 0:
        headers["If-None-Match"] = "*"
    elif expected_version is not None:
        headers["If-Match"] = f'"{expected_version}"'
    if once is not None:
        headers["Idempotency-Key"] = once
    if body is None:
        return ClientRequest(method, path, {}, headers)
    is_patch = method == "PATCH"
    headers["Content-Type"] = "application/merge-patch+json" if is_patch else "application/json"
    content = json.dumps(body, ensure_ascii=False, allow_nan=False, default=_decimal_text)
    return ClientRequest(method, path, {}, headers, content.encode())


def _decimal_text(value: Any) -> str:
    """A decimal as text, in which the server keeps every digit."""
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def listed(key: str, item: Mapping[str, Any] | None) -> Found | None:
    """One of many entities; ``None``: there is none with this key."""
    return None if item is None else Found(key, item["state"], item["version"], item["as_of"])


def found(key: str, answer: httpx.Response) -> Found:
    """The answer to a question for one entity."""
    return Found(key, body_of(answer), _version(answer), answer.headers.get("Everstate-As-Of"))


def saved(key: str, answer: httpx.Response) -> Saved:
    """The answer to a write."""
    changed = "Everstate-Change-Id" in answer.headers
    return Saved(key, _version(answer), changed, answer.headers.get("Everstate-Token"))


def body_of(answer: httpx.Response) -> Any:
    """The JSON of a successful answer."""
    try:
        return decode(answer.content)
    except msgspec.DecodeError as error:
        raise _unexpected(answer, f"no JSON ({error})") from error


def failure(status: int, body: Any) -> RequestFailed:
    """The error that a problem describes (RFC 9457)."""
    told = body if isinstance(body, dict) else {}
    kind = str(told.get("type", "")).rpartition(":")[2] or str(told.get("title", "HTTP error"))
    detail = str(told.get("detail") or f"the server answered with status {status}.")
    return RequestFailed(status, kind, detail, told.get("advice"))


def redirected(status: int, target: str) -> RequestFailed:
    """The error for a redirect, which is not followed: nothing was read or written."""
    return RequestFailed(
        status,
        "Redirected",
        f"the server answered with status {status}, a redirect to {target}, which is not followed.",
        _ADDRESS,
    )


def _unexpected(answer: httpx.Response, what: str) -> RequestFailed:
    status = answer.status_code
    return RequestFailed(
        status,
        "UnexpectedAnswer",
        f"the server answered with status {status} and {what}. everstate does not answer so: "
        "another server or a proxy did, and whether the request was done is not known.",
        _ADDRESS,
    )


def _version(answer: httpx.Response) -> int:
    deleted_by = answer.headers.get("Everstate-Version", "")
    if deleted_by.isdecimal():
        return int(deleted_by)
    tag = answer.headers.get("ETag")
    match = None if tag is None else _VERSION_TAG.fullmatch(tag)
    if match is None:
        raise _unexpected(answer, "no ETag" if tag is None else f"the ETag {tag}, not a version")
    return int(match[1])
