"""When a capture's connector that has failed is started again, and when it is left as it is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from prometheus_client import REGISTRY
from pydantic import BaseModel

from everstate.app import App
from everstate.config import Config, load
from everstate.declarations.captures import Capture, Table
from everstate.errors import CaptureFailed, EverstateError, SourceReplaced, Unavailable
from everstate.roles import Role, run_roles
from everstate.sources.cdc import restarting
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.halted import SnapshotWatch
from everstate.sources.cdc.rest import NoSuchConnector
from everstate.sources.cdc.restarting import (
    AGAIN_S_MAX,
    LOOK_S,
    STEADY_S,
    Restarter,
    restarters_of,
)


class Item(BaseModel):
    id: int


class Connector:
    """A connector with its database, as far as they are asked."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.refusal: EverstateError | None = None
        self.restarts = 0
        self.stays_failed = False
        self.position: dict[str, Any] = {}
        self.gives_up: str | None = None
        self.nudges = 0
        self.reads_anew = 0
        self.updates, self.is_former = 0, False
        self.replaced: EverstateError | None = None
        self.is_paused = False

    def bring_up_to_date(self) -> bool:
        self.updates += 1
        was, self.is_former = self.is_former, False
        return was

    def check_source(self, *, renew: bool = False) -> None:
        assert renew
        if self.replaced is not None:
            raise self.replaced

    def pause(self) -> None:
        self.is_paused = True

    def running_position(self) -> dict[str, Any]:
        return self.position

    def nudge(self) -> None:
        self.nudges += 1

    def restart_reading(self) -> None:
        self.reads_anew += 1

    def failure(self) -> str | None:
        return self.reason

    def restart_failed(self) -> str | None:
        if self.refusal is not None:
            raise self.refusal
        self.restarts += 1
        if not self.stays_failed:
            self.reason = None
        return self.gives_up


class Rig:
    """A restarter without its thread, a connector, and a clock."""

    def __init__(self, name: str = "shop") -> None:
        self.now_s = 1000.0
        self.connector: Any = Connector()
        self.restarter = Restarter(name, lambda: self.connector, clock=lambda: self.now_s)

    def look(self, seconds: float = LOOK_S) -> bool:
        self.now_s += seconds
        return self.restarter.step()


def test_a_connector_that_failed_is_restarted_with_the_next_look_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig("shop_counted")
    assert not rig.look()
    rig.connector.reason = "FATAL: terminating connection due to administrator command"
    with caplog.at_level(logging.WARNING):
        assert rig.look()
    assert "administrator command" in caplog.text
    assert not rig.look()
    assert rig.connector.restarts == 1
    counted = {"capture": "shop_counted"}
    assert REGISTRY.get_sample_value("everstate_capture_restarts_total", counted) == 1


def test_what_goes_on_failing_is_restarted_after_a_growing_time() -> None:
    rig = Rig()
    rig.connector.reason, rig.connector.stays_failed = "wrong", True
    assert rig.look()
    waits = []
    for _ in range(8):
        began = rig.now_s
        while not rig.look():
            pass
        waits.append(rig.now_s - began)
    assert waits == [10, 20, 40, 80, 160, 320, 600, 600]


def test_what_ran_for_a_while_is_restarted_at_once() -> None:
    rig = Rig()
    rig.connector.reason = "passes"
    assert rig.look()
    rig.connector.reason = "passes"
    assert not rig.look(), "it failed again within 10 s"
    assert rig.look()
    assert not rig.look(20 + STEADY_S)
    rig.connector.reason = "passes"
    assert rig.look()
    assert rig.connector.restarts == 3


def test_a_database_that_is_away_is_asked_at_each_look_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()
    rig.connector.reason, rig.connector.refusal = "gone", Unavailable("the database is away.")
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            assert not rig.look()
    assert caplog.text.count("the database is away.") == 1
    rig.connector.refusal = None
    assert rig.look(), "an outage does not make the wait grow"


def test_a_position_that_is_lost_is_told_and_never_restarted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()
    rig.connector.reason, rig.connector.refusal = "lost", CaptureFailed("the slot is lost.")
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            assert not rig.look(AGAIN_S_MAX)
    assert caplog.text.count("the slot is lost.") == 1
    assert rig.connector.restarts == 0


def test_a_snapshot_that_halted_is_restarted_and_a_silent_one_is_nudged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, found = Rig(), list[str]()
    monkeypatch.setattr(SnapshotWatch, "look", lambda _self, _position: found.pop(0))
    found += ["goes on", "silent", "halted"]
    while found:
        assert not rig.look()
    assert (rig.connector.nudges, rig.connector.reads_anew) == (1, 1)


def test_a_connector_that_is_removed_while_it_is_looked_at_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()

    def removed(_self: object) -> dict[str, Any]:
        raise NoSuchConnector

    monkeypatch.setattr(Connector, "running_position", removed)
    assert not rig.look()


def test_a_table_that_a_snapshot_cannot_read_is_told_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()
    rig.connector.reason = "failed"
    rig.connector.gives_up = "public.items: no column b"
    assert rig.look()
    assert "is given up: public.items: no column b" in caplog.text


def test_a_connector_of_somebody_else_is_not_ours_to_restart_and_none_is_no_failure() -> None:
    table = {"public.item": Table(entity="item")}
    ours = Capture(name="ours", kind="postgresql", tables=table, dsn="postgresql://u:p@h/d")
    theirs = Capture(name="theirs", kind="postgresql", tables=table)
    config = load()
    restarters = restarters_of({"ours": ours, "theirs": theirs}, {}, lambda: config)
    assert len(restarters) == 1
    assert not restarters[0].step(), "no Connect runs yet: nobody has added the capture"
    assert Capturing(config, ours, local=False).failure() is None


def test_the_clean_role_looks_after_the_connectors_while_it_cleans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = App("shop")
    app.entity("item", key="id", source="capture")(Item)
    app.capture(
        "shop",
        kind="postgresql",
        dsn="postgresql://u:p@h/d",
        tables={"public.item": Table(entity="item")},
    )
    connector = Connector()
    connector.reason = "passes"
    monkeypatch.setattr(restarting, "LOOK_S", 0.0)
    monkeypatch.setattr(restarting, "Capturing", lambda *_, **__: connector)
    stop = threading.Event()

    def cleaning_part(config: Config, open_capture: object) -> Callable[[threading.Event], None]:
        def clean(stop: threading.Event) -> None:
            for _ in range(500):
                if connector.restarts:
                    break
                time.sleep(0.01)
            stop.set()

        return clean

    monkeypatch.setattr("everstate.pipeline.clean.cleaning_part", cleaning_part)
    # No JVM here: the part that cleans is another one.
    monkeypatch.setattr("everstate.local.spark_jars", lambda *_: ())
    monkeypatch.setattr(
        "everstate.pipeline.spark.session.own_spark", lambda *_, **__: nullcontext()
    )
    addresses = {
        "EVERSTATE_LOG_BOOTSTRAP_SERVERS": "127.0.0.1:1",
        "EVERSTATE_STORE_DSN": "dbname=p",
    }
    for name, value in addresses.items():
        monkeypatch.setenv(name, value)
    run_roles([Role.CLEAN], load(), app, stop)
    assert connector.restarts == 1


def test_a_connector_of_an_earlier_version_gets_the_settings_of_this_one_once() -> None:
    rig = Rig()
    rig.connector.is_former = True
    for _ in range(5):
        rig.look()
    assert (rig.connector.updates, rig.connector.is_former) == (1, False)


def test_a_connector_whose_database_was_replaced_stops_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()
    rig.connector.position = {"lsn": 5}
    rig.look()
    rig.connector.replaced = SourceReplaced("shop", "it is b, and was a")
    for _ in range(20):
        rig.look()
    assert rig.connector.is_paused
    assert [line for line in caplog.messages if "--new-epoch" in line] != []
    assert len(caplog.messages) == 1
