"""Commands that wait for a pipeline end without one, and those that repeat go on after an error."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner, Result

from everstate.cli import cli
from everstate.errors import EverstateError, InvalidQuery, RequestCancelled, Unavailable
from everstate.pipeline.reports import ViewReport
from everstate.views.control import BUILDING, ViewVersion

VIEWS = "everstate.cli.views"


class StoppedPipeline:
    """The control tables of a pipeline that stops after it was seen once."""

    def __init__(self, version: ViewVersion) -> None:
        self._version, self._seen, self._read = version, 0, 0

    def is_on_duty(self, _: str) -> bool:
        self._seen += 1
        return self._seen == 1

    def versions(self, _: str) -> list[ViewVersion]:
        self._read += 1
        assert self._read < 10, "it waits for ever"
        return [self._version]


def test_a_rebuild_ends_when_the_pipeline_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = ViewVersion("names", 3, "guest", "row", {}, (), "", status=BUILDING)

    @contextmanager
    def control(_: object) -> Any:
        yield StoppedPipeline(version)

    rebuild = "everstate.cli.rebuild"
    monkeypatch.setattr(f"{rebuild}.control_of", control)
    monkeypatch.setattr("everstate.cli.console.AppSession.connected", lambda *_, **__: (None, None))
    monkeypatch.setattr(f"{rebuild}._POLL_S", 0.0)
    monkeypatch.setattr("everstate.cli.asking._GONE_S", 0.0, raising=False)
    monkeypatch.setattr("everstate.views.changing.ask_rebuild", lambda *_, **__: version)
    done = CliRunner().invoke(cli, ["-C", str(tmp_path), "views", "rebuild", "names"])
    told = " ".join(done.output.split())
    assert done.exit_code == RequestCancelled.exit_code
    assert "no pipeline has run for 0 s; version 3 stays requested" in told


def recompute(monkeypatch: pytest.MonkeyPatch, errors: list[EverstateError | None]) -> Result:
    """Recompute on a schedule: a round for each of them, which fails with it."""
    rounds = iter([*errors, InvalidQuery("enough")])

    def prove(*_: object, **__: object) -> tuple[list[ViewReport], list[str]]:
        if (error := next(rounds)) is not None:
            raise error
        return [], []

    monkeypatch.setattr(f"{VIEWS}.prove", prove)
    monkeypatch.setattr("everstate.cli.console.AppSession.connected", lambda *_, **__: (None, None))
    # The module's own name: every thread of this process has the same time.sleep.
    clock = SimpleNamespace(sleep=lambda _: None, monotonic=time.monotonic)
    monkeypatch.setattr(f"{VIEWS}.time", clock)
    return CliRunner().invoke(cli, ["views", "recompute", "--schedule", "6h", "--json"])


def test_a_schedule_goes_on_after_a_server_did_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    away = [Unavailable("PostgreSQL is away."), RequestCancelled("recompute", "none runs")]
    done = recompute(monkeypatch, [None, *away, None])
    assert "PostgreSQL is away." in done.stderr
    assert "none runs" in done.stderr
    assert "enough" in done.stderr
    assert done.stdout.splitlines() == ["[]", "[]"]


def test_each_status_of_a_watch_is_one_line_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = iter([0.0, 0.0])

    def sleep(_: float) -> None:
        if next(rounds, None) is None:
            raise KeyboardInterrupt

    clock = SimpleNamespace(sleep=sleep, time=time.time)
    monkeypatch.setattr("everstate.cli.status.time", clock)
    done = CliRunner().invoke(cli, ["-C", str(tmp_path), "status", "--watch", "--json"])
    lines = done.stdout.splitlines()
    assert [sorted(orjson.loads(line)) for line in lines] == [
        ["attention", "roles", "servers", "views"]
    ] * 3
