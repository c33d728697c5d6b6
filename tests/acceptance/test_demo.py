"""The demonstration from an empty folder, and the pages that go on from it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from java_settings import both_compilers

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-m", "everstate.cli", "demo"]

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder in which the demonstration was played, and what it said."""
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        DEMO, cwd=folder, env=both_compilers(), capture_output=True, timeout=600, check=False
    )
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
