"""The role `alerts`: looks at the project, logs alerts, and sends them to a webhook."""

from __future__ import annotations

import logging
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter as Counts
from collections import deque
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any, Final

import msgspec
import orjson
from prometheus_client import Counter, Gauge

from everstate.app import App
from everstate.attention.alerts import Alert, Alerts, Tracked
from everstate.attention.conditions import NO_ROLE
from everstate.attention.looking import Looking, SeenProject
from everstate.config import Config
from everstate.errors import Unavailable
from everstate.parts import PartRun
from everstate.private import private_folder, write_private
from everstate.runtime.worker import Repeated, Worker, part_of
from everstate.serving import Reader

logger = logging.getLogger(__name__)

CONDITIONS = Gauge("everstate_conditions", "Conditions that need attention", ["kind", "level"])
FIRING = Gauge("everstate_alerts_firing", "Alerts that fire and are not resolved")
UNSENT = Gauge("everstate_alerts_unsent", "Alerts that the webhook has not acknowledged yet")
SENT = Counter("everstate_alerts_sent", "Alerts that the webhook acknowledged")
LAG_S = Gauge(
    "everstate_reader_lag_seconds", "Age of the oldest change not read", ["reader", "topic"]
)
LAG = Gauge("everstate_reader_lag_changes", "Changes that were not read yet", ["reader", "topic"])
SHARE = Gauge(
    *("everstate_reader_retention_share", "Age of the oldest change not read, of the retention"),
    ["reader", "topic"],
)
TOPIC_BYTES = Gauge("everstate_topic_bytes", "Size of a topic, of all replicas", ["topic"])
FULL_S = Gauge("everstate_log_disk_full_seconds", "When the log fills a disk", ["broker", "folder"])
HELD = Gauge("everstate_capture_held_bytes", "WAL held by the slot of a capture", ["capture"])

WATCH: Final = "watch"
WEBHOOK: Final = "webhook"
_UNSENT_MAX: Final = 10_000
_PAUSE_S: Final = 1.0
_PAUSE_S_MAX: Final = 300.0
_OWN: Final = f"part:alerts: {WEBHOOK}"
"""The condition that the webhook does not answer: it cannot be sent to the webhook."""


class _Stored(msgspec.Struct):
    """The state of the alerts in its file."""

    tracked: list[Tracked]
    unsent: list[Alert]


class Alerting:
    """Alerts of one project, with their state in a file that survives a restart.

    :meth:`parts` gives the jobs. One looks and logs; it never waits for the webhook. The other one
    delivers the alerts in order, and retries until each is acknowledged.
    """

    def __init__(self, config: Config, app: App) -> None:
        self._config, self._app = config, app
        self._file = config.project.data_dir / "alerts.json"
        self._lock = threading.Lock()
        self._alerts = Alerts(app.name, config.alerts.hold_s, lambda: str(uuid.uuid4()))
        self._unsent: deque[Alert] = deque()
        self._measuring = _Measuring()
        self._restore()

    def parts(self) -> dict[str, PartRun]:
        """The jobs of the role."""
        found = {WATCH: part_of(lambda: _Watching(self._config, self._app, self.take))}
        if self._config.alerts.webhook_url is not None:
            found[WEBHOOK] = part_of(
                lambda: Repeated(
                    *("the alerts' webhook", self.send_one, _PAUSE_S),
                    retry_s=(_PAUSE_S, _PAUSE_S_MAX),
                )
            )
        return found

    def take(self, seen: SeenProject, now_s: float) -> None:
        """Log and store the alerts that follow from what was seen."""
        self._measuring.set(seen)
        # Roles of other machines leave no state here, and the webhook cannot report itself.
        conditions = [each for each in seen.conditions if each.key not in (NO_ROLE, _OWN)]
        with self._lock:
            alerts = self._alerts.step(conditions, seen.unknown, now_s)
            for alert in alerts:
                level = logging.WARNING if alert.status == "firing" else logging.INFO
                logger.log(level, "%s", alert.text)
            if self._config.alerts.webhook_url is not None:
                self._unsent += alerts
            while len(self._unsent) > _UNSENT_MAX:
                logger.error("an alert is never sent: %s", self._unsent.popleft().text)
            self._store()
        FIRING.set(sum(each.is_firing for each in self._alerts.tracked.values()))

    def send_one(self) -> bool:
        """Deliver the oldest stored alert; false: there is none. Raises Unavailable."""
        with self._lock:
            alert = self._unsent[0] if self._unsent else None
            UNSENT.set(len(self._unsent))
        if alert is None:
            return False
        section = self._config.alerts
        assert section.webhook_url is not None
        deliver(section.webhook_url, alert, section.webhook_timeout_s)
        SENT.inc()
        with self._lock:
            if self._unsent and self._unsent[0] is alert:
                self._unsent.popleft()
            self._store()
        return True

    def _restore(self) -> None:
        """Continue where an earlier process ended."""
        try:
            stored = msgspec.json.decode(self._file.read_bytes(), type=_Stored)
            self._alerts.restore(stored.tracked)
            self._unsent = deque(stored.unsent)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            logger.warning("%s is not readable, and alerts fire again: %s", self._file, error)

    def _store(self) -> None:
        """Write the state; a full disk must not end the role."""
        state = _Stored(list(self._alerts.tracked.values()), list(self._unsent))
        try:
            private_folder(self._file.parent)
            write_private(self._file, msgspec.json.encode(state).decode())
        except OSError as error:
            logger.warning("the state of the alerts is not written: %s", error)


class _Watching(Worker):
    """Looks at a project every `alerts.every_s`; ``take`` gets what was seen, and when."""

    doing = "looking for what needs attention"

    def __init__(self, config: Config, app: App, take: Callable[[SeenProject, float], None]):
        self.idle_s = config.alerts.every_s
        self._take = take
        self._reader = Reader(config, app)
        self._looking = Looking(config, app, self._reader)

    def step(self) -> None:
        """Look once."""
        self._take(self._looking.look(), time.time())

    def close(self) -> None:
        """Close the readers."""
        self._reader.close()


class _Values:
    """The values of a gauge with labels: those that are gone are removed, and no other.

    A gauge that was cleared and set again would be empty for whoever reads it meanwhile.
    """

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._known: set[tuple[str, ...]] = set()

    def set(self, given: Mapping[tuple[str, ...], float | None]) -> None:
        """Make these the values, by labels; ``None`` is no value."""
        values = {labels: value for labels, value in given.items() if value is not None}
        for labels, value in values.items():
            self._gauge.labels(*labels).set(value)
        for labels in self._known - set(values):
            self._gauge.remove(*labels)
        self._known = set(values)


class _Measuring:
    """Sets the metrics; what was not seen keeps its value."""

    def __init__(self) -> None:
        self._conditions, self._held = _Values(CONDITIONS), _Values(HELD)
        self._lag_s, self._lag, self._share = _Values(LAG_S), _Values(LAG), _Values(SHARE)
        self._bytes, self._full = _Values(TOPIC_BYTES), _Values(FULL_S)

    def set(self, seen: SeenProject) -> None:
        """Set them from what was seen."""
        self._conditions.set(Counts((each.kind, each.level) for each in seen.conditions))
        if seen.readers is not None:
            readers = {(each.reader, each.topic): each for each in seen.readers}
            self._lag_s.set({place: each.lag_seconds for place, each in readers.items()})
            self._lag.set({place: each.lag_changes for place, each in readers.items()})
            self._share.set({place: each.share for place, each in readers.items()})
        if seen.size is not None:
            self._bytes.set({(name,): each.bytes for name, each in seen.size.topics.items()})
            disks = seen.size.disks
            self._full.set({(str(disk.broker), disk.folder): at_s for disk, at_s in disks})
        if "captures" not in seen.unknown:
            self._held.set({(each.capture,): each.held_bytes or 0 for each in seen.captures})


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
