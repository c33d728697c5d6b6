"""What `everstate run` prints as things change, and what `everstate status` says of the roles."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from rich.text import Text
from typer.testing import CliRunner

from everstate.cli import cli
from everstate.cli.watching import changes
from everstate.config import load
from everstate.errors import Fenced, Unavailable
from everstate.parts import Journal, Part, RoleState, states_folder
from everstate.runtime.claim import claimed

APP = """
from everstate.app import App
app = App("shop")
"""


def role(name: str, parts: dict[str, Part], doing: str | None = None) -> RoleState:
    return RoleState(name, os.getpid(), time.time(), time.time(), parts, doing)


def plain(lines: list[Text]) -> list[str]:
    return [line.plain for line in lines]


RUNNING = Part("running", 0)


def test_what_a_role_does_before_its_parts_run_is_told_once() -> None:
    starting = role("pipeline", {}, "starting Spark")
    assert plain(changes([], [starting])) == ["pipeline: starting Spark"]
    assert changes([starting], [starting]) == []


def test_views_that_are_live_are_told_in_one_line() -> None:
    parts = {"keeper": RUNNING, "view board": RUNNING, "view delays": RUNNING}
    lines = changes([role("pipeline", {"keeper": RUNNING})], [role("pipeline", parts)])
    assert plain(lines) == ["pipeline: views live: board, delays"]


def test_parts_that_wait_for_the_same_thing_are_one_line_with_its_advice() -> None:
    waiting = Part("waiting", 0, "Kafka does not answer.", "`everstate up` starts it.")
    before = role("pipeline", {"keeper": RUNNING, "archive-guest": RUNNING})
    now = role("pipeline", {"keeper": waiting, "archive-guest": waiting})
    told = plain(changes([before], [now]))
    assert told == [
        "pipeline: keeper, archive-guest wait, and try again: Kafka does not answer.\n"
        "         `everstate up` starts it."
    ]
    again = role("pipeline", {"keeper": waiting, "archive-guest": RUNNING})
    assert plain(changes([now], [again])) == ["pipeline: archive-guest runs again"]


def test_a_view_that_fails_is_told_with_its_reason() -> None:
    failed = Part("waiting", 0, "view board failed at offset 12 (key 'g1'): [CAST] no number")
    told = plain(
        changes(
            [role("pipeline", {"view board": RUNNING})], [role("pipeline", {"view board": failed})]
        )
    )
    assert told == [
        "pipeline: view board waits, and tries again: "
        "view board failed at offset 12 (key 'g1'): [CAST] no number"
    ]


def test_a_role_that_ended_is_told_by_its_supervisor() -> None:
    before = role("run", {"relay": RUNNING, "pipeline": RUNNING})
    ended = Part("waiting", 0, "it was ended by SIGKILL", retry_at=time.time() + 5.4)
    stopped = Part("stopped", 0, "project.app is None", "Set it.")
    now = role("run", {"relay": ended, "pipeline": stopped})
    assert plain(changes([before], [now])) == [
        "relay ended, and starts again in 5 s: it was ended by SIGKILL",
        "pipeline stopped: project.app is None\n         Set it.",
    ]


def test_a_second_supervisor_of_a_project_is_refused(tmp_path: Path) -> None:
    config = load(tmp_path)
    with claimed(config):
        with pytest.raises(Fenced, match=f"runs already in .* \\(process {os.getpid()}\\)"):
            with claimed(config):
                pass
    with claimed(config):
        pass


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose servers are somebody else's, and not there."""
    (tmp_path / "shop_of_run.py").write_text(APP)
    (tmp_path / "everstate.toml").write_text(
        '[project]\napp = "shop_of_run:app"\n[log]\nbootstrap_servers = "127.0.0.1:1"\n'
        '[store]\ndsn = "postgresql://127.0.0.1:1/nowhere"\n'
    )
    return tmp_path


@pytest.fixture
def no_server_complains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers of the project are not asked, so that only its roles count."""
    monkeypatch.setattr("everstate.attention.looking.Looking._asked", lambda *_: None)


def test_run_refuses_at_start_where_it_runs_already(project: Path) -> None:
    with claimed(load(project)):
        told = CliRunner().invoke(cli, ["-C", str(project), "run"])
    assert told.exit_code == 7
    assert "`everstate run` runs already" in told.stderr
    assert f"`kill {os.getpid()}`" in told.stderr


@pytest.mark.usefixtures("no_server_complains")
def test_the_status_of_a_project_where_nothing_runs_says_what_starts_it(project: Path) -> None:
    told = CliRunner().invoke(cli, ["-C", str(project), "status"])
    assert told.exit_code == 0
    assert "`everstate run` starts them" in told.stdout


@pytest.mark.usefixtures("no_server_complains")
def test_the_status_names_the_part_that_waits_its_reason_and_its_advice(project: Path) -> None:
    journal = Journal("pipeline", states_folder(project / ".everstate"))
    journal.running("archive-guest")
    journal.running("view board")
    told = CliRunner().invoke(cli, ["-C", str(project), "status"])
    assert told.exit_code == 0
    assert "1 view " in told.stdout
    journal.failed("archive-guest", Unavailable("the disk is full.", advice="Make room."), 60.0)
    told = CliRunner().invoke(cli, ["-C", str(project), "status"])
    assert told.exit_code == 1
    assert "1 of 2 do not run" in told.stdout
    assert "pipeline: archive-guest waits, and tries again in" in told.stdout
    assert "the disk is full." in told.stdout
    assert "Make room." in told.stdout
    found = json.loads(CliRunner().invoke(cli, ["-C", str(project), "status", "--json"]).stdout)
    assert found["roles"][0]["parts"]["archive-guest"]["reason"] == "the disk is full."
    assert found["roles"][0]["health"] == "running"
