"""The demonstration from an empty folder, and the pages that go on from it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-m", "everstate.cli", "demo"]

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder in which the demonstration was played, and what it said."""
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(DEMO, cwd=folder, capture_output=True, timeout=600, check=False)
    said = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == 0, said
    yield folder, done.stdout.decode()
    down = [sys.executable, "-m", "everstate.cli", "-C", ".everstate/demo", "down"]
    subprocess.run(down, cwd=folder, check=True, capture_output=True)


@pytest.mark.timeout(700)
def test_the_demonstration_answers_and_proves_every_view(played: tuple[Path, str]) -> None:
    _, said = played
    assert "73,592 changes" in said
    assert "DEPARTURES" in said
    assert "CANCELLED" in said
    assert "FlightDeparted" in said
    assert "JetBlue" in said
    for view in ("board", "delay_by_carrier", "cancellations_by_day", "flights_by_origin"):
        assert re.search(rf"{view}\b.*\bholds\b", said), view
    assert "peak memory" in said


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", ["docs/tutorial/flights.md", "README.md"])
def test_a_page_goes_on_from_the_demonstration(
    played: tuple[Path, str], make_reader: Any, page: str
) -> None:
    folder, _ = played
    assert make_reader(folder).follow(ROOT / page) > 3


@pytest.mark.timeout(300)
def test_ctrl_c_stops_everything_that_was_started(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole group in its foreground: to children too."""
    said = tmp_path / "said.txt"
    with said.open("wb") as output:
        process = subprocess.Popen(
            DEMO, cwd=tmp_path, stdout=output, stderr=output, start_new_session=True
        )
    started: set[psutil.Process] = set()

    def flights_are_played() -> bool:
        started.update(psutil.Process(process.pid).children(recursive=True))
        assert process.poll() is None, said.read_text()
        return re.search(r"store [\d,]+, log", said.read_text()) is not None

    wait_for(flights_are_played)
    assert "java" in {each.name() for each in started if each.is_running()}
    os.killpg(process.pid, signal.SIGINT)
    code = process.wait(120)
    assert code != 0, said.read_text()
    assert "Traceback" not in said.read_text()
    _, left = psutil.wait_procs(list(started), timeout=10)
    assert left == []


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
