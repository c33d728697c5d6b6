"""Makes pages of templates: escaping, headers that forbid foreign content, errors as pages."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from importlib import resources
from typing import Any, Final
from urllib.parse import quote

from fastapi import Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

import everstate
from everstate.changes.row_json import row_json
from everstate.errors import EverstateError
from everstate.serving import ABSENT
from everstate.serving.words import duration_text, moment_text, size_text, value_text
from everstate.telemetry import safe_text

ROOT: Final = "/console"
PLACE: Final = f"{ROOT}/-"
"""Pages that belong to no entity type: no entity type is named `-`."""
PAGES: Final = (
    ("Overview", "/"),
    ("Entities", ROOT),
    ("Views", f"{PLACE}/views"),
    ("Log", f"{PLACE}/log"),
    ("Dead letters", f"{PLACE}/dead"),
    ("Handlers", f"{PLACE}/handlers"),
    ("Sources", f"{PLACE}/sources"),
)
"""Names and addresses of the pages, in the order of the navigation."""
DOTS: Final = (".", "..")
"""Keys that a browser would take for a path."""
VALUE_MAX: Final = 2_000
"""Characters of one value on a page; the whole value is in the JSON of the state."""

MARK: Final = "Everstate-Console"
"""Header by which the script tells a part or a page of the console from an answer of a proxy."""
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Vary": "Accept",
}
_TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def entity_url(entity: str, key: str | None = None, **query: Any) -> str:
    """Address of an entity type's page, or of one entity's.

    A browser shortens the paths `.` and `..`, so that such a key is sent in the query.
    """
    path = f"{ROOT}/{quote(entity, safe='')}"
    if key in DOTS:
        query = {"key": key, **query}
    elif key is not None:
        path += f"/{quote(key, safe='')}"
    return with_query(path, **query)


def view_url(name: str, **query: Any) -> str:
    """Address of a view's page."""
    return with_query(f"{PLACE}/views/{quote(name, safe='')}", **query)


def with_query(path: str, **query: Any) -> str:
    """A path with the parameters that are not ``None``."""
    given = [
        f"{name}={quote(str(value), safe='')}" for name, value in query.items() if value is not None
    ]
    return f"{path.rstrip('?')}?{'&'.join(given)}" if given else path


def static_files() -> dict[str, tuple[bytes, str]]:
    """The style sheet, the script and the icon: name → content and media type."""
    folder = resources.files("everstate.console").joinpath("static")
    found = {}
    for file in folder.iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            found[file.name] = (file.read_bytes(), kind)
    return found


class Pages:
    """Renders the templates; every value is shown as text, whatever it contains."""

    def __init__(self, project: str, *, has_login: bool) -> None:
        self.static = static_files()
        digest = hashlib.sha256(b"".join(content for content, _ in self.static.values()))
        self._templates = Environment(
            loader=PackageLoader("everstate.console"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_finalized,
        )
        self._templates.filters.update(
            moment=_moment,
            value=_value,
            field=_field,
            whole=lambda value: row_json(value, indented=True).decode(),
            coded=_coded,
            seconds=duration_text,
            size=size_text,
            number=_number,
        )
        self._templates.globals.update(
            entity_url=entity_url,
            view_url=view_url,
            with_query=with_query,
            place=PLACE,
            project=project,
            has_login=has_login,
            navigation=PAGES,
            edition=digest.hexdigest()[:12],
            version=everstate.__version__,
        )

    def page(self, template: str, *, status: int = 200, **facts: Any) -> Response:
        """A page, or a part of one that the script puts into its place."""
        text = self._templates.get_template(template).render(now=datetime.now(UTC), **facts)
        headers = {**_HEADERS, MARK: "part" if template.endswith("_part.html") else "page"}
        return Response(text.encode(), status, headers=headers, media_type="text/html")

    def error(self, error: EverstateError, *, part: bool) -> Response:
        """The page for an error: what happened, and what to do next."""
        template = "error_part.html" if part else "error.html"
        status = error.http_status
        response = self.page(template, status=status, error=error, is_away=status == 503)
        if error.retryable:
            response.headers["Retry-After"] = "1"
        return response

    def redirect(self, address: str) -> Response:
        """Send the browser to another page, by GET."""
        return Response(status_code=303, headers={**_HEADERS, "Location": address})

    def json(self, value: bytes) -> Response:
        """JSON, to look at or to save."""
        return Response(value, headers=_HEADERS, media_type="application/json")


def _finalized(value: Any) -> Any:
    """Control characters and marks that reorder text are shown as escapes, as in a terminal."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return safe_text(value)


def _moment(moment: datetime | None) -> Markup | str:
    """A time to the second in UTC, with its full text for programs."""
    if moment is None:
        return "–"
    shown = moment.astimezone(UTC)
    template = '<time datetime="{}" title="{}">{}</time>'
    return Markup(template).format(
        shown.isoformat(), shown.isoformat(sep=" "), moment_text(shown, UTC)
    )


def _value(value: Any, limit: int = VALUE_MAX) -> str:
    """A value as text, cut after so many characters; before, where a page needs more for each."""
    text = value_text(value)
    shown = text[:limit]
    while len(escape(safe_text(shown)).encode()) > 4 * limit:
        shown = shown[: len(shown) * 3 // 4]
    if len(shown) == len(text):
        return text
    return f"{shown} … ({len(text):,} characters)"


def _field(value: Any, limit: int) -> Markup | str:
    """The value of a field: null and a field that is not there look unlike each other and texts."""
    if value is ABSENT:
        return Markup('<span class="dim">not there</span>')
    return Markup("<em>null</em>") if value is None else _value(value, limit)


def _coded(text: str) -> Markup:
    """Text in which what is between backticks is shown as code; all of it stays text."""
    parts = safe_text(text).split("`")
    if len(parts) % 2 == 0:
        return Markup("{}").format(safe_text(text))
    shown = (Markup("<code>{}</code>" if at % 2 else "{}").format(p) for at, p in enumerate(parts))
    return Markup("").join(shown)


def _number(value: float | None) -> str:
    """A number with separators."""
    if value is None:
        return "–"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
