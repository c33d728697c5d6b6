"""The demonstration from an empty folder, and the pages that go on from it.

Two days are played here, and the month in the full run: only then are the figures of the
pages those of the demonstration.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from everstate.config import load
from everstate.local import Stack
from java_settings import both_compilers
from page_reader import Reader, run_here
from tiers import TIER, counted

ROOT = Path(__file__).parents[2]
TWO_DAYS = ["--from", "2013-02-08", "--days", "2"]

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]


@pytest.fixture(scope="module")
def played(
    tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> Iterator[tuple[Path, str]]:
    """A folder in which the demonstration was played, and what it said."""
    folder = tmp_path_factory.mktemp("demo")
    try:
        if TIER.is_full:
            done = subprocess.run(
                [sys.executable, "-m", "everstate.cli", "demo"],
                cwd=folder,
                env=both_compilers(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=600,
                check=False,
            )
            code, said = done.returncode, done.stdout.decode()
        else:
            code, said = run_here(["everstate", "demo", *TWO_DAYS], folder, {})
        assert code == 0, said
        yield folder, said
    finally:
        Stack(load(folder / ".everstate" / "demo")).stop()


@pytest.mark.timeout(700)
def test_the_demonstration_answers_and_proves_every_view(played: tuple[Path, str]) -> None:
    _, said = played
    assert (counted("3,977 changes", full="73,592 changes")) in said
    assert "DEPARTURES" in said
    assert "CANCELLED" in said
    assert "FlightDeparted" in said
    assert "JetBlue" in said
    for view in ("board", "delay_by_carrier", "cancellations_by_day", "flights_by_origin"):
        assert re.search(rf"{view}\b.*\bholds\b", said), view
    assert "peak memory" in said


@pytest.mark.timeout(600)
def test_the_tutorial_goes_on_from_the_demonstration(played: tuple[Path, str]) -> None:
    folder, _ = played
    reader = Reader(folder, real=False, figures=TIER.is_full)
    assert reader.follow(ROOT / "docs" / "tutorial" / "flights.md") > 3


@pytest.mark.timeout(600)
def test_readme_goes_on_from_the_demonstration_by_real_processes(
    played: tuple[Path, str],
) -> None:
    folder, _ = played
    assert Reader(folder, figures=TIER.is_full).follow(ROOT / "README.md") > 3
