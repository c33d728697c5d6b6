"""What the views answer over HTTP: the list of them, their rows by pages, and single rows.

No web framework here. Rows are the body; their position is in headers: the version of the view,
its position as a token, and how far that is behind the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import quote, unquote, urlencode

from everstate.api.reading import limit_of, moment_of
from everstate.app import App
from everstate.changes.quoting import conditions_in, order_in
from everstate.changes.row_json import row_json
from everstate.config import Config
from everstate.errors import NotFound
from everstate.http.answers import HttpAnswer, HttpRequest, Parameters, tagged
from everstate.http.callers import TOKEN
from everstate.serving import Reader
from everstate.serving.freshness import Freshness
from everstate.serving.masking import entities_read_by
from everstate.serving.view_list import listed_views
from everstate.serving.view_rows import RowsQuery, ViewPage, read_page, read_row

VIEW_VERSION: Final = "Everstate-View-Version"
LAG_CHANGES: Final = "Everstate-Lag-Changes"
LAG_SECONDS: Final = "Everstate-Lag-Seconds"
PLACE: Final = "/views/v1"


class ViewReading:
    """Answers from the views of a project; threads share it.

    Its methods raise UnknownView, NotFound, InvalidQuery, ContradictoryQuery, InvalidToken,
    NotCaughtUp and Unavailable.
    """

    def __init__(self, config: Config, app: App, reader: Reader) -> None:
        self._config, self._app, self._reader = config, app, reader
        self.page_max: Final = config.api.page_max
        self._freshness = Freshness(config)

    def close(self) -> None:
        """Close the connections; no question may be open."""
        self._freshness.close()

    def listed(self, incoming: HttpRequest, _given: Parameters) -> HttpAnswer:
        """All views that the caller may read: version, kind, columns, position, lag and state."""
        listed = listed_views(self._reader)
        may = partial(incoming.caller.may, right="read")
        shown = [e for e in listed if all(map(may, entities_read_by(self._app, e["name"])))]
        return _answer(incoming, {}, {"items": shown})

    def rows(self, incoming: HttpRequest, given: Parameters, view: str) -> HttpAnswer:
        """A page of the rows of a view: by conditions and in an order, or those with some words."""
        asked = RowsQuery(
            where=conditions_in(given.get("where", "")),
            order=order_in(given.get("order", "")),
            after=given.get("after"),
            limit=limit_of(given, self.page_max),
            words=given.get("q"),
            at=moment_of(given, "at"),
        )
        page = read_page(self._config, self._app, view, asked, wait_for=incoming.wait_for)
        headers = self._headers(page)
        if page.after is not None:
            query = urlencode({**given, "after": page.after}, quote_via=quote)
            headers["Link"] = f'<{PLACE}/{quote(view, safe="")}?{query}>; rel="next"'
        return _answer(incoming, headers, {"items": page.records(), "after": page.after})

    def row(self, incoming: HttpRequest, _given: Parameters, view: str, *, key: str) -> HttpAnswer:
        """The row of a view that has a key, whose parts are those of the path as it was sent."""
        del key  # decoded, so that a slash may be within a part or between two
        sent = incoming.sent_path.split(b"/")[5:]
        try:
            parts = [unquote(part.decode("ascii"), errors="strict") for part in sent]
        except UnicodeDecodeError:
            raise NotFound("a key of a row is text in UTF-8.") from None
        page = read_row(self._config, self._app, view, parts, wait_for=incoming.wait_for)
        return _answer(incoming, self._headers(page), page.records()[0])

    def _headers(self, page: ViewPage) -> dict[str, str]:
        standpoint = page.standpoint
        headers = {VIEW_VERSION: str(standpoint.version.version)}
        if standpoint.token is not None:
            headers[TOKEN] = standpoint.token
        behind = self._freshness.behind(standpoint.position)
        if behind is not None:
            headers[LAG_CHANGES] = str(behind.changes)
            headers[LAG_SECONDS] = f"{behind.seconds:.3f}"
        return headers


def _answer(incoming: HttpRequest, headers: Mapping[str, str], content: Any) -> HttpAnswer:
    """An answer whose ETag is a hash of its body: a position does not show deferred changes."""
    told = {**headers, "Cache-Control": "private, no-cache"}
    return tagged(incoming, told, row_json(content).decode())
