"""Views for both clients: what is asked, and what becomes of answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from everstate.changes.quoting import joined
from everstate.client.requests import PAGE, ClientRequest, reading, segment

_PLACE: Final = "/views/v1"


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


def rows_request(
    name: str,
    where: Sequence[str],
    order: Sequence[str],
    wait_for: str | None,
    *,
    after: str | None = None,
    limit: int = PAGE,
    words: str | None = None,
) -> ClientRequest:
    """The request for a page."""
    query = {"where": joined(where) or None, "order": ";".join(order) or None}
    page = {"after": after, "limit": limit, "q": words}
    return reading(f"{_PLACE}/{segment(name)}", wait_for, {}, **query, **page)


def row_request(name: str, key: Sequence[Any], wait_for: str | None) -> ClientRequest:
    """The request for the row that has a key."""
    parts = "/".join(segment(_text(part)) for part in key)
    return reading(f"{_PLACE}/{segment(name)}/rows/{parts}", wait_for, {})


def following(name: str, where: Sequence[str], since: str | None) -> ClientRequest:
    """The request for a subscription."""
    path = f"{_PLACE}/{segment(name)}/stream"
    return reading(path, None, {}, where=joined(where) or None, since=since)


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
