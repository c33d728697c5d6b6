"""Delivers one alert to a webhook: a POST of JSON, acknowledged by any answer of 200 to 299."""

from __future__ import annotations

import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any, Final

import orjson

from everstate.attention.alerts import Alert
from everstate.errors import Unavailable

_ADVICE: Final = "Check alerts.webhook_url. Alerts are stored, and sent when the receiver answers."


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET without the alert."""

    def redirect_request(self, *_: Any) -> None:
        """Follow no redirect: it is then an error."""
        return


_OPENER: Final = urllib.request.build_opener(_NoRedirect())


def deliver(url: str, alert: Alert, timeout_s: float) -> None:
    """Send an alert; raises Unavailable when the receiver does not acknowledge it.

    The URL may hold a secret, so no message shows it.
    """
    headers = {"Content-Type": "application/json", "User-Agent": "everstate"}
    body = orjson.dumps(alert.payload())
    try:
        request = urllib.request.Request(url, body, headers, method="POST")
        with _OPENER.open(request, timeout=timeout_s) as answer:
            answer.read(1)
    except urllib.error.HTTPError as cause:
        with cause:
            said = f"the alerts' webhook answered HTTP {cause.code}."
        raise Unavailable(said, advice=_ADVICE) from None
    except urllib.error.URLError as cause:
        said = f"the alerts' webhook does not answer ({_reason(cause.reason)})."
        raise Unavailable(said, advice=_ADVICE) from None
    except (OSError, HTTPException, ValueError) as cause:
        said = f"the alerts' webhook does not answer ({_reason(cause)})."
        raise Unavailable(said, advice=_ADVICE) from None


def _reason(cause: object) -> str:
    """A cause without the address that it may name."""
    named = cause.strerror if isinstance(cause, OSError) else None
    return named or type(cause).__name__
