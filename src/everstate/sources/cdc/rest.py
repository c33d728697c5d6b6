"""Client for the part of Kafka Connect's REST interface that a capture needs; raises our errors."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any, Final
from urllib.parse import quote

from everstate.errors import CaptureFailed, Unavailable
from everstate.retrying import within
from everstate.telemetry import without_secret

_TIMEOUT_S: Final = 30.0
_REBALANCING: Final = 409
_HEADERS: Final = {"Content-Type": "application/json", "Accept": "application/json"}


def _is_rebalancing(error: BaseException) -> bool:
    cause = error.__cause__
    return isinstance(cause, urllib.error.HTTPError) and cause.code == _REBALANCING


_AGAIN: Final = within(60.0, _is_rebalancing, pause_s=0.2)


class NoSuchConnector(Exception):
    """Connect knows no connector of that name."""


class Connect:
    """One Connect cluster by its REST address; a call is a request, retried during a rebalance.

    Raises Unavailable when it does not answer, CaptureFailed with its reason when it refuses, and
    NoSuchConnector where the name is unknown.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def plugin_version(self, class_name: str) -> str | None:
        """Version of the plugin with a connector's class; ``None``: the cluster has none."""
        found = self._ask("GET", "/connector-plugins")
        return next((str(p["version"]) for p in found if p["class"] == class_name), None)

    def config(self, connector: str) -> dict[str, str]:
        """Settings of a connector; references to secrets are not resolved."""
        return dict(self._ask("GET", self._path(connector, "config")))

    def make_stopped(self, connector: str, config: Mapping[str, str]) -> None:
        """Make a connector that reads nothing before :meth:`resume`."""
        body = {"name": connector, "config": dict(config), "initial_state": "STOPPED"}
        self._ask("POST", "/connectors", body)

    def put(self, connector: str, config: Mapping[str, str]) -> None:
        """Make the connector, or give it these settings."""
        self._ask("PUT", self._path(connector, "config"), dict(config))

    def status(self, connector: str) -> dict[str, Any]:
        """State of the connector and of its tasks, as Connect reports it."""
        return dict(self._ask("GET", self._path(connector, "status")))

    def offset(self, connector: str) -> dict[str, Any]:
        """Source position that Connect has stored; empty when there is none yet."""
        listed = self._ask("GET", self._path(connector, "offsets")).get("offsets") or [{}]
        return dict(listed[0].get("offset") or {})

    def alter_offset(self, connector: str, offset: Mapping[str, Any]) -> None:
        """Replace the stored source position of a stopped connector."""
        path = self._path(connector, "offsets")
        (stored,) = self._ask("GET", path)["offsets"]
        self._ask("PATCH", path, {"offsets": [{**stored, "offset": dict(offset)}]})

    def forget_offsets(self, connector: str) -> None:
        """Delete the stored source position of a stopped connector."""
        self._ask("DELETE", self._path(connector, "offsets"))

    def pause(self, connector: str) -> None:
        """Ask for state PAUSED; tasks stay, and fill their queues without writing."""
        self._ask("PUT", self._path(connector, "pause"))

    def resume(self, connector: str) -> None:
        """Ask for state RUNNING."""
        self._ask("PUT", self._path(connector, "resume"))

    def stop(self, connector: str) -> None:
        """Ask for state STOPPED; its tasks are ended."""
        self._ask("PUT", self._path(connector, "stop"))

    def restart(self, connector: str, *, only_failed: bool = True) -> None:
        """Start its failed parts again, or all of its tasks, at the stored position."""
        only = "&onlyFailed=true" if only_failed else ""
        self._ask("POST", f"{self._path(connector, 'restart')}?includeTasks=true{only}")

    def delete(self, connector: str) -> None:
        """Remove the connector; its stored position stays."""
        self._ask("DELETE", self._path(connector))

    @staticmethod
    def _path(connector: str, *parts: str) -> str:
        return "/".join(("/connectors", quote(connector, safe=""), *parts))

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        return _AGAIN(self._ask_once, method, path, body)

    def _ask_once(self, method: str, path: str, body: object) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, _HEADERS, method=method)
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                text = answer.read()
            return json.loads(text) if text else None
        except urllib.error.HTTPError as cause:
            with cause:
                reason = _reason(cause)
            if cause.code == 404:
                raise NoSuchConnector(path) from cause
            if cause.code >= 500 and "Request timed out" in reason:
                raise Unavailable(f"Kafka Connect at {self._place}: {reason}") from cause
            raise CaptureFailed(f"Kafka Connect at {self._place}: {reason}") from cause
        except (OSError, HTTPException, ValueError) as cause:
            raise Unavailable(
                f"Kafka Connect at {self._place} does not answer ({cause}).",
                advice="`everstate status` shows whether the local one runs.",
            ) from cause

    @property
    def _place(self) -> str:
        return without_secret(self.url)


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["message"]).strip()
    except (ValueError, KeyError, TypeError, OSError):
        return f"HTTP {error.code}"
