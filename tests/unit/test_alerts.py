"""A condition fires once and is resolved once; what the webhook does not take is kept for it."""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY
from pydantic import create_model

from everstate.app import App
from everstate.attention.alerting import WATCH, WEBHOOK, Alerting, deliver
from everstate.attention.alerts import Alert, Alerts
from everstate.attention.conditions import (
    Concern,
    all_concerns,
    of_capture,
    of_dead_letters,
    of_readers,
    of_roles,
    of_views,
)
from everstate.attention.looking import SeenProject
from everstate.changes import EntityType
from everstate.changes.drift import Heard
from everstate.cli.results import show_pieces
from everstate.cli.status import _roles_pieces
from everstate.config import Config, load
from everstate.errors import Unavailable
from everstate.log.lag import LagRow
from everstate.parts import (
    Journal,
    Part,
    PartConcern,
    RoleState,
    read_states,
    run_parts,
    states_folder,
    works,
)
from everstate.sections import AlertsConfig
from everstate.serving.answers import ViewRow
from everstate.serving.log_state import ARCHIVE, LogReader
from everstate.sources.cdc.status import CaptureStatus
from everstate.sources.outbox.behind import check_store
from webhook_receiver import receiving

LATE = Concern("view-late:by_city.1", "readers", "views", "late", "view by_city", "is late.")
LIMITS = AlertsConfig()


def alerts(hold_s: float = 60) -> Alerts:
    numbers = itertools.count(1)
    return Alerts("hotel", hold_s, lambda: f"id-{next(numbers)}")


def told(found: list[Alert]) -> list[tuple[str, str]]:
    return [(each.status, each.condition) for each in found]


def test_a_condition_fires_once_after_it_held_and_is_resolved_once() -> None:
    watched = alerts()
    steps = [watched.step([LATE], (), at) for at in (0, 30, 59, 60, 75, 600)]
    assert [told(each) for each in steps] == [[], [], [], [("firing", LATE.key)], [], []]
    assert steps[3][0].since == "1970-01-01T00:00:00+00:00"
    assert steps[3][0].at == "1970-01-01T00:01:00+00:00"
    steps = [watched.step([], (), at) for at in (615, 630)]
    assert [told(each) for each in steps] == [[("resolved", LATE.key)], []]
    assert steps[0][0].text == "hotel: resolved: view by_city is late."


def test_a_condition_that_passes_sooner_is_told_to_nobody() -> None:
    watched = alerts()
    for at in range(0, 600, 30):
        holds = [LATE] if at % 60 == 0 else []
        assert watched.step(holds, (), at) == []


def test_what_cannot_be_seen_is_neither_fired_nor_resolved() -> None:
    watched = alerts(hold_s=0)
    assert told(watched.step([LATE], (), 0)) == [("firing", LATE.key)]
    assert watched.step([], {"readers"}, 15) == []
    assert watched.step([LATE], (), 30) == []
    assert watched.step([], {"store", "log"}, 45) != []


def test_a_restart_repeats_nothing() -> None:
    before = alerts(hold_s=0)
    before.step([LATE], (), 0)
    after = alerts(hold_s=0)
    after.restore(before.tracked.values())
    assert after.step([LATE], (), 15) == []
    assert told(after.step([], (), 30)) == [("resolved", LATE.key)]


def view(**changed: Any) -> ViewRow:
    row = ViewRow(
        name="by_city",
        version=1,
        kind="linear",
        entity="guest",
        rows=None,
        position={},
        lag_changes=0,
        lag_seconds=0.0,
        updated_at=None,
        verified_at=None,
        verified=None,
        status="live",
        throttled=0,
        progress=None,
    )
    return replace(row, **changed)


def reader(name: str, late_s: float, retention_s: float | None) -> LogReader:
    row = LagRow("t.changes", 0, name, 1, 5, 4 if late_s else 0, late_s)
    return LogReader(name, "t.changes", (row,), retention_s)


def capture(**changed: Any) -> CaptureStatus:
    status = CaptureStatus("shop", "RUNNING", "RUNNING", True, 0.0, 0, 0, None)
    return replace(status, **changed)


def test_each_sort_of_condition_is_found_and_nothing_else() -> None:
    def keys(found: Any) -> list[str]:
        return [each.key for each in found]

    assert keys(of_views([view(verified={"holds": True})], LIMITS)) == []
    late = view(lag_seconds=61.0, lag_changes=7)
    assert keys(of_views([late], LIMITS)) == ["view-late:by_city.1"]
    assert keys(of_views([view(status="behind", error="1 / 0")], LIMITS)) == [
        "view-behind:by_city.1"
    ]
    assert keys(of_views([view(verified={"holds": False})], LIMITS)) == [
        "view-not-proved:by_city.1"
    ]
    hour = [reader(ARCHIVE, 3600, None), reader("by_city", 3700, None)]
    assert keys(of_readers(hour, LIMITS)) == []
    assert keys(of_readers([reader(ARCHIVE, 3601, None)], LIMITS)) == ["archive-late:t.changes"]
    expiring = [reader("by_city", 51, 100), reader("other", 49, 100)]
    assert keys(of_readers(expiring, LIMITS)) == ["log-expires:by_city:t.changes"]
    # What was dropped is no lag any more, and the worst of all.
    lost = replace(reader("by_city", 0, 3600), lost_offsets=7)
    (concern,) = of_readers([lost], LIMITS)
    assert concern.key == "log-expired:by_city:t.changes"
    assert "dropped 7 offsets" in concern.why
    assert keys(of_dead_letters([], 24)) == []
    assert keys(of_dead_letters(["guest", None], 24)) == ["dead-letters:guest", "dead-letters:?"]
    assert keys(of_capture(capture(held_bytes=1 << 30), LIMITS)) == []
    assert keys(of_capture(capture(held_bytes=(1 << 30) + 1), LIMITS)) == ["capture-wal:shop"]
    assert keys(of_capture(capture(task="FAILED"), LIMITS)) == ["capture-stopped:shop"]
    assert keys(of_capture(capture(problems=("no key",)), LIMITS)) == [
        "capture-problem:shop:no key"
    ]


def test_a_problem_of_a_capture_is_resolved_when_it_is_gone_and_no_other_is() -> None:
    first, second = "slot shop: 5 GiB are missing", "table t1: there is none"
    seen = [
        (first, second, "table t1: no key", "3 rows are lost"),
        ("slot shop: 6 GiB are missing", "table t1: no key", "4 rows are lost"),
        ("table t1: no key", "4 rows are lost"),
    ]
    watched = alerts(hold_s=0)
    steps = [
        watched.step(of_capture(capture(problems=problems), LIMITS), (), at)
        for at, problems in enumerate(seen)
    ]
    slot, table, rows = (
        f"capture-problem:shop:{subject}"
        for subject in ("slot shop", "table t1", "# rows are lost")
    )
    fired = [("firing", key) for key in (slot, table, rows)]
    assert [told(each) for each in steps] == [fired, [], [("resolved", slot)]]
    assert steps[0][1].why == f"{second}; table t1: no key"
    assert steps[2][0].why == "slot shop: 6 GiB are missing"


def test_roles_and_what_their_parts_found_are_conditions(tmp_path: Path) -> None:
    journal = Journal("pipeline", tmp_path)
    journal.note("keeper", Part("waiting", 0, "Kafka is away"))
    drifted = PartConcern("drift of guest:", "3 of 9 entities had drifted.", "Look.", is_bad=False)
    journal.found("drift of guest", drifted)
    (state,) = read_states_of(tmp_path)
    found = {each.key: each for each in of_roles([state])}
    assert [*found] == ["part:pipeline: keeper", "found:drift of guest"]
    assert found["found:drift of guest"].level == "warn"
    journal.found("drift of guest", None)
    journal.running("keeper")
    assert [*of_roles(read_states_of(tmp_path))] == []
    assert [each.key for each in of_roles([])] == ["roles:none"]


def test_a_version_that_cannot_be_built_is_one_condition(tmp_path: Path) -> None:
    journal = Journal("pipeline", tmp_path)
    for part in ("view by_city, version 1", "view by_city, version 2", "keeper"):
        journal.note(part, Part("stopped", 0, "refused: no such column"))
    behind = of_views([view(status="building", error="refused: no such column")], LIMITS)
    found = all_concerns(of_roles(read_states_of(tmp_path)), [*behind])
    assert sorted(each.key for each in found) == [
        "part:pipeline: keeper",
        "part:pipeline: view by_city, version 2",
        "view-behind:by_city.1",
    ]


def test_what_was_found_stays_while_its_role_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "pipeline-1.json").write_text(
        json.dumps(
            {
                "role": "pipeline",
                "pid": 1 << 22,
                "started": 1.0,
                "beat": 1.0,
                "parts": {},
                "findings": {"drift of guest": asdict(PartConcern("drift", "3 of 9"))},
            }
        )
    )
    keys = {each.key for each in of_roles(read_states_of(tmp_path))}
    assert keys == {"role:pipeline", "found:drift of guest"}
    Journal("pipeline", tmp_path)
    for file in (tmp_path / "roles").iterdir():
        file.unlink()
    assert [each.key for each in of_roles(read_states_of(tmp_path))] == ["found:drift of guest"]


def test_a_store_behind_its_log_is_told_all_the_time_however_long_the_relay_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The relay is started again and reads the whole log again; until then nothing has passed."""
    stop, now, looks, seen = threading.Event(), [0.0], list[int](), list[list[Concern]]()
    journal = Journal("relay", states_folder(tmp_path))

    def records(_topic: str) -> Iterator[SimpleNamespace]:
        looks.append(0)
        for _ in range(20):
            now[0] += 5  # a large log
            looks[-1] += 1
            journal.beat()
            if len(looks) > 1:
                seen.append([*of_roles(read_states(tmp_path))])
            yield SimpleNamespace(key=b"g1", value=None)

    truth = SimpleNamespace(is_behind=lambda _: len(looks) < 4 and looks[-1] == 20)
    for name, value in {
        "everstate.parts.time.monotonic": lambda: now[0],
        "everstate.sources.outbox.behind._KEYS_EACH": 1,
        "everstate.sources.outbox.behind._heard": lambda _: Heard(2, "id"),
        "everstate.sources.outbox.behind.missing_tables": lambda *_: set[str](),
        "everstate.sources.outbox.behind.Consumer": lambda *_, **__: nullcontext(
            SimpleNamespace(read_topic=records)
        ),
        "everstate.sources.outbox.behind.PostgresTruth.of": lambda *_: truth,
    }.items():
        monkeypatch.setattr(name, value)
    guest = EntityType("guest", create_model("Guest", id=(str, ...)), "id")

    def relay(stop: threading.Event) -> None:
        check_store(cast(Any, None), Config(), [guest], "relay main")
        show_pieces(*_roles_pieces(read_states(tmp_path)))
        works()
        at_last.append([*of_roles(read_states(tmp_path))])
        stop.set()

    at_last = list[list[Concern]]()
    run_parts(journal, {"relay": relay}, stop, retry_s=(0.01,))
    assert at_last == [[]]
    assert all(seen), "it is told at each moment"
    (last,) = seen[-1]
    for text in (f"{last.why} {last.advice}", capsys.readouterr().out):
        assert "the log has versions of guest that the store does not have" in text
        assert "`everstate drift repair guest`" in text
    watched = alerts(hold_s=30)
    steps = [watched.step(found, (), at) for at, found in ((0, seen[0]), (30, seen[-1]), (60, []))]
    assert [told(each) for each in steps] == [[], [("firing", last.key)], [("resolved", last.key)]]


def value(gauge: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(gauge, labels)


def test_metrics_follow_what_was_seen_and_keep_what_was_not(tmp_path: Path) -> None:
    alerting = Alerting(settings(tmp_path, None), App("hotel"))
    lag = {"reader": "by_city", "topic": "t.changes"}
    alerting.take(replace_readers(seen(LATE), [reader("by_city", 70, None)]), 0.0)
    assert value("everstate_conditions", kind="view-late", level="bad") == 1
    assert value("everstate_reader_lag_seconds", **lag) == 70
    assert value("everstate_alerts_firing") == 1
    alerting.take(seen(), 1.0)
    assert value("everstate_conditions", kind="view-late", level="bad") is None
    assert value("everstate_reader_lag_changes", **lag) == 4, "the log did not answer"
    assert value("everstate_alerts_firing") == 0
    alerting.take(replace_readers(seen(), []), 2.0)
    assert value("everstate_reader_lag_changes", **lag) is None


def replace_readers(found: SeenProject, readers: list[LogReader]) -> SeenProject:
    found.readers = readers
    return found


def read_states_of(folder: Path) -> list[RoleState]:
    (folder / "roles").mkdir(exist_ok=True)
    for file in folder.glob("*.json"):
        (folder / "roles" / file.name).write_text(file.read_text("utf-8"), "utf-8")
    return read_states(folder)


@pytest.mark.parametrize("status", [301, 302, 400, 404, 500, 503])
def test_only_an_acknowledgement_counts_as_delivered(status: int) -> None:
    (alert,) = alerts(hold_s=0).step([LATE], (), 0)
    with receiving() as receiver:
        receiver.status = status
        with pytest.raises(Unavailable, match=f"HTTP {status}") as refused:
            deliver(receiver.url, alert, 5)
        assert receiver.refused == 1
        receiver.status = 200
        deliver(receiver.url, alert, 5)
    assert receiver.told("id", "status", "condition") == [("id-1", "firing", LATE.key)]
    assert "s3cret" not in f"{refused.value} {refused.value.advice}"
    with pytest.raises(Unavailable, match="does not answer") as gone:
        deliver(receiver.url, alert, 5)
    assert "127.0.0.1" not in str(gone.value)


def test_a_receiver_that_never_answers_is_given_up_after_the_time_out() -> None:
    (alert,) = alerts(hold_s=0).step([LATE], (), 0)
    with receiving() as receiver:
        receiver.answers.clear()
        with pytest.raises(Unavailable, match="does not answer"):
            deliver(receiver.url, alert, 0.2)


def settings(folder: Path, url: str | None) -> Config:
    given: dict[str, Any] = {"hold_s": 0, "every_s": 0.1, "webhook_timeout_s": 30}
    return load(folder, alerts={**given, "webhook_url": url} if url else given)


def seen(*conditions: Concern) -> SeenProject:
    return SeenProject(datetime.now(UTC), (), list(conditions))


def test_alerts_are_logged_also_without_a_webhook(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alerting = Alerting(settings(tmp_path, None), App("hotel"))
    assert [*alerting.parts()] == [WATCH]
    with caplog.at_level(logging.INFO, "everstate"):
        for at in (0.0, 1.0, 2.0):
            alerting.take(seen(LATE), at)
        alerting.take(seen(), 3.0)
    assert caplog.messages == [
        "hotel: firing: view by_city is late.",
        "hotel: resolved: view by_city is late.",
    ]


def test_a_webhook_that_is_down_loses_nothing_and_delays_nobody(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config = settings(tmp_path, f"http://127.0.0.1:{port}/hook?token=s3cret")
    alerting = Alerting(config, App("hotel"))
    keys = [f"view-late:v{number}.1" for number in range(20)]
    stop, journal = threading.Event(), Journal("alerts", states_folder(tmp_path / ".everstate"))
    role = threading.Thread(
        target=run_parts, args=(journal, {WEBHOOK: alerting.parts()[WEBHOOK]}, stop)
    )

    def waits() -> bool:
        part = journal.state.parts.get(WEBHOOK)
        return part is not None and part.state == "waiting"

    role.start()
    try:
        begun = time.monotonic()
        for number, key in enumerate(keys):
            alerting.take(seen(replace(LATE, key=key)), float(number))
        assert time.monotonic() - begun < 5, "the checks do not wait for the webhook"
        until("the part waits", waits)
    finally:
        stop.set()
        role.join(60)
    # Another process, as after a restart, has a receiver that hangs first.
    again, stop = Alerting(config, App("hotel")), threading.Event()
    with receiving(port) as receiver:
        receiver.answers.clear()
        thread = threading.Thread(target=again.parts()[WEBHOOK], args=(stop,))
        thread.start()
        again.take(seen(), 20.0)
        assert receiver.bodies == []
        receiver.answers.set()
        until("all were delivered", lambda: len(receiver.bodies) == 2 * len(keys))
        stop.set()
        thread.join(60)
    firing = [key for status, key in receiver.told("status", "condition") if status == "firing"]
    resolved = [key for status, key in receiver.told("status", "condition") if status != "firing"]
    assert firing == resolved == keys
    assert len({body["id"] for body in receiver.bodies}) == len(receiver.bodies)
    assert (tmp_path / ".everstate" / "alerts.json").stat().st_mode & 0o077 == 0
    assert os.listdir(tmp_path / ".everstate" / "roles") == []


def until(what: str, holds: Any) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_a_state_that_is_not_readable_starts_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / ".everstate"
    folder.mkdir()
    (folder / "alerts.json").write_text('{"tracked": [{"condition": {}}]', "utf-8")
    alerting = Alerting(settings(tmp_path, None), App("hotel"))
    assert "fire again" in caplog.text
    alerting.take(seen(LATE), 0.0)
