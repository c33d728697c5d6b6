"""What the client sends and what it makes of answers: pure, for both clients."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Final, NamedTuple, TypedDict
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

    def posting(self, body: Any) -> ClientRequest:
        """The same question with a body."""
        content = json.dumps(body, ensure_ascii=False).encode()
        headers = {"Content-Type": "application/json", **self.headers}
        return self._replace(method="POST", headers=headers, content=content)


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


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a subscription."""

    name: str
    """``current``: a present row (key, version, state); ``change``: a change, as in the log;
    ``live``: everything before the subscription was delivered; ``dropped``: changes were left out,
    since they came too fast; ``error``: the subscription ended. Of a view: ``snapshot``: all rows;
    ``changed``: the rows that differ at a later position, each ``before`` and ``after``."""
    data: Any
    token: str | None
    """Continue after this event with it."""


def place(entity: str, key: str | None = None, *below: str) -> str:
    """Path of an entity type, an entity, or what is below it.

    Raises InvalidRequest for an empty part, `.` and `..`: the path would be that of something else.
    """
    parts = [entity, *([] if key is None else [key]), *below]
    if "" in parts:
        raise InvalidRequest("an entity type, key or field is empty; expected a text.")
    return "/v1/" + "/".join(map(segment, parts))


def view_place(name: str, *below: Any) -> str:
    """Path of a view or what is below it, such as the values of a row's key; raises as `place`."""
    return "/".join(("/views/v1", segment(name), *(segment(_text(part)) for part in below)))


def segment(text: str) -> str:
    """A text as a part of a path; raises InvalidRequest for `.` and `..`."""
    if text in (".", ".."):
        raise InvalidRequest(f"{text!r} cannot be part of a URL: HTTP clients remove it.")
    return quote(text, safe="")


class ChangesFilter(TypedDict, total=False):
    """Which changes are wanted: who wrote them, and when they were recorded."""

    service: str | None
    identifier: str | None
    actor: str | None
    correlation: str | None
    kind: str | None
    since: datetime | None
    until: datetime | None


def filters(given: ChangesFilter) -> ChangesFilter:
    """The filters of a question; raises TypeError for a name that is none of them."""
    if unknown := given.keys() - ChangesFilter.__annotations__.keys():
        raise TypeError(f"no filters of changes: {', '.join(sorted(unknown))}")
    return given


class WriteSettings(TypedDict, total=False):
    """How an entity is written."""

    provenance: Provenance | None
    """Default: that of the client."""
    expected_version: int | None
    """The write is refused at another version; 0: the entity must not exist."""
    once: str | None
    """An Idempotency-Key."""


def reading(path: str, wait_for: str | None = None, **query: Any) -> ClientRequest:
    """A question; parameters that are ``None`` are left out."""
    given = {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in query.items()
        if value is not None
    }
    headers = {} if wait_for is None else {"Everstate-Wait-For": wait_for}
    return ClientRequest("GET", path, given, headers)


def writing(
    method: str,
    path: str,
    body: Any,
    *,
    provenance: Provenance | None = None,
    expected_version: int | None = None,
    once: str | None = None,
) -> ClientRequest:
    """A write, with its :class:`WriteSettings`."""
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
        raise unexpected(answer, f"no JSON ({error})") from error


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


def unexpected(answer: httpx.Response, what: str) -> RequestFailed:
    """The error for an answer that everstate does not give."""
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
        raise unexpected(answer, "no ETag" if tag is None else f"the ETag {tag}, not a version")
    return int(match[1])


@dataclass(frozen=True, slots=True)
class ViewRows:
    """A page of the rows of a view, and the position that they have."""

    rows: list[dict[str, Any]]
    version: int
    """Version of the view."""
    token: str | None
    """The position of the view that the rows are of; pass it as ``wait_for``. ``None``: throttled
    changes wait, which the rows lack."""
    lag_seconds: float | None
    """Age of the oldest change that the rows lack; ``None``: the log does not answer."""
    after: str | None
    """Continue after this page with it; ``None``: there are no more rows."""


def page_of(body: Mapping[str, Any], headers: Mapping[str, str]) -> ViewRows:
    """The answer to a request for a page."""
    lag = headers.get("Everstate-Lag-Seconds")
    return ViewRows(
        body["items"],
        int(headers["Everstate-View-Version"]),
        headers.get("Everstate-Token"),
        None if lag is None else float(lag),
        body["after"],
    )


def _text(part: Any) -> str:
    if isinstance(part, bool):
        return "true" if part else "false"
    return part.isoformat() if hasattr(part, "isoformat") else str(part)
