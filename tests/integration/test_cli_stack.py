"""`everstate up`, `down`, `status`, `doctor` as a user runs them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from processes_seen import kill_for_good

PROGRAM = "import everstate.cli; everstate.cli.main()"


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A project that needs PostgreSQL only; what a test leaves running is stopped."""
    (tmp_path / "everstate.toml").write_text('[log]\nbootstrap_servers = "127.0.0.1:1"\n')
    yield tmp_path
    everstate(tmp_path, "down")


def everstate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, "-c", PROGRAM, *arguments),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def servers(folder: Path) -> list[dict[str, Any]]:
    told = json.loads(everstate(folder, "status", "--json").stdout)
    rows: list[dict[str, Any]] = told["servers"]
    return rows


def test_up_outlives_its_command_and_down_stops_it(project: Path) -> None:
    up = everstate(project, "up")
    assert (up.returncode, up.stderr.count("postgres answers")) == (0, 1)
    assert "running" in up.stdout
    pid = servers(project)[0]["pid"]
    again = everstate(project, "up", "--json")
    assert json.loads(again.stdout)[0]["pid"] == pid
    assert "is already running" in again.stderr
    shown = everstate(project, "status")
    assert (shown.returncode, "the log (Kafka) does not answer" in shown.stdout) == (6, True)
    assert "PostgreSQL) does not answer" not in shown.stdout
    assert everstate(project, "down").stdout == "stopped postgres\n"
    assert everstate(project, "down").stdout == "no server was running\n"
    gone = everstate(project, "status")
    assert (gone.returncode, "stopped" in gone.stdout) == (6, True)


@pytest.mark.full
def test_a_crash_shows_in_the_status_and_up_mends_it(project: Path) -> None:
    everstate(project, "up")
    kill_for_good(servers(project)[0]["pid"])
    deadline = time.monotonic() + 10
    while servers(project)[0]["state"] == "running" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert servers(project)[0]["state"] == "crashed"
    doctor = everstate(project, "doctor")
    assert doctor.returncode == 1
    assert "crashed" in doctor.stdout
    assert "everstate up" in doctor.stdout
    up = everstate(project, "up")
    assert up.returncode == 0, up.stderr
    assert servers(project)[0]["state"] == "running"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_foreground_a_signal_stops_all(project: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        (sys.executable, "-c", PROGRAM, "up", "--foreground"),
        cwd=project,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as up:
        assert up.stderr is not None
        while "Ctrl-C" not in up.stderr.readline():
            assert up.poll() is None
        assert servers(project)[0]["state"] == "running"
        up.send_signal(number)
        assert up.wait(30) == (143 if number is signal.SIGTERM else 0)
    assert servers(project)[0]["state"] == "stopped"


def test_doctor_is_content_with_this_machine(project: Path) -> None:
    everstate(project, "up")
    told = everstate(project, "doctor", "--json")
    found = json.loads(told.stdout)
    failed = [check["name"] for check in found if check["outcome"] == "fail"]
    assert (told.returncode, failed) == (1, ["kafka"]), (
        "no broker is at the address in the settings"
    )
    checks = {check["name"]: check for check in found}
    assert {"python", "java", "memory", "data folder", "cache", "settings", "postgres"} <= set(
        checks
    )
    assert checks["postgres"]["outcome"] == "ok"
    assert "project" in checks["settings"]["advice"]


def test_doctor_names_the_setting_that_is_wrong(project: Path) -> None:
    (project / "everstate.toml").write_text("[log]\npartitions = 0\n")
    told = everstate(project, "doctor")
    assert told.returncode == 1
    assert "log.partitions is 0" in told.stdout
    (project / "everstate.toml").write_text('[project]\napp = "nowhere:app"\n')
    told = everstate(project, "doctor")
    assert told.returncode == 1
    assert "no module 'nowhere'" in told.stdout


def test_a_wrong_setting_is_a_sentence_and_an_exit_code(project: Path) -> None:
    (project / "everstate.toml").write_text("[log]\npartitions = 0\n")
    told = everstate(project, "status")
    assert told.returncode == 2
    assert told.stdout == ""
    assert "error: everstate.toml:2: log.partitions is 0" in told.stderr
    assert "Traceback" not in told.stderr
    assert "Traceback" in everstate(project, "--debug", "status").stderr


@pytest.mark.full
def test_nothing_is_started_for_who_has_both_servers(project: Path) -> None:
    (project / "everstate.toml").write_text(
        '[log]\nbootstrap_servers = "kafka:9092"\n[store]\ndsn = "postgresql://db/shop"\n'
    )
    assert "nothing to start" in everstate(project, "up").stdout
    assert everstate(project, "status").returncode == 6
    assert servers(project) == []


def test_the_version_and_the_menu_are_told(tmp_path: Path) -> None:
    assert everstate(tmp_path, "--version").stdout.startswith("everstate 0.")
    menu = everstate(tmp_path).stdout
    assert all(verb in menu for verb in ("up", "down", "status", "doctor"))
