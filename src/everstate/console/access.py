"""Who may see the console: a token in a cookie, checked as the API checks one in a header.

The API never reads the cookie, so that a page of another site cannot write with it.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final
from urllib.parse import urlsplit

from fastapi import Request, Response

from everstate.errors import InvalidRequest, Unauthenticated

COOKIE: Final = "everstate_token"
_BYTES_MAX: Final = 4096


def headers_of_page(request: Request) -> dict[str, str]:
    """What a request for a page says of its caller: the token of its header, or of the cookie.

    It names no caller in other headers: pages write nothing.
    """
    given = request.headers.get("authorization")
    token = _token_of(request.cookies.get(COOKIE, ""))
    return {"authorization": f"Bearer {token}" if given is None else given}


def set_cookie(response: Response, request: Request, token: str) -> None:
    """Keep the token in the browser until it is closed; no script and no other site can use it."""
    encoded = base64.urlsafe_b64encode(token.encode()).decode()
    response.set_cookie(
        COOKIE,
        encoded,
        path="/",
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


def check_same_site(request: Request) -> None:
    """Raise InvalidRequest for a form that a page of another site sent (CSRF).

    A browser says from which site a form comes; a program that is no browser says nothing.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        is_own = site in ("same-origin", "none")
    else:
        is_own = origin is None or _host_of(origin) == request.headers.get("host", "")
    if not is_own:
        raise InvalidRequest("the form was sent by a page of another site.")


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def address_of(request: Request) -> str:
    """Path and query of a request as the browser sent them: decoded, a key may be another path."""
    path, query = request.scope["raw_path"].decode("latin-1"), request.url.query
    return f"{path}?{query}" if query else path


def path_within(text: str) -> str:
    """A path of the console to go on to; `/` for anything else, such as another site."""
    is_plain = text.isascii() and text.isprintable() and "\\" not in text
    is_ours = text == "/console" or text.startswith(("/console/", "/console?"))
    return text if is_plain and is_ours else "/"


def _token_of(cookie: str) -> str:
    if len(cookie) > _BYTES_MAX:
        return ""
    try:
        return base64.urlsafe_b64decode(cookie.encode()).decode()
    except (UnicodeError, binascii.Error):
        return ""


def token_in_form(body: dict[str, list[str]]) -> str:
    """The token of a sent form; raises Unauthenticated without one."""
    given = body.get("token", [""])[0].strip()
    if not given:
        raise Unauthenticated("no token was given.", advice="Give a token of [api.tokens].")
    return given
