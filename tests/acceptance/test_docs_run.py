"""Every page that shows how to do something is done."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstate.config import load
from everstate.local import Stack

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("expected", "output", "same"),
    [
        ("", "anything", True),
        ("a b", "x a   b y", True),
        ("a … b", "a 1 2 b", True),
        ("a … c", "a 1 2 b", False),
        ("…1.5…", "ab 1.5", True),
        ("…1.5…", "ab 125", False),
    ],
)
def test_an_output_is_compared_with_what_the_page_shows(
    make_reader: Any, expected: str, output: str, same: bool
) -> None:
    assert make_reader.matches(expected, output) is same


@pytest.fixture
def alone(tmp_path: Path, make_reader: Any) -> Iterator[Any]:
    """A reader who has nothing but the package: the local stack is started as the page says."""
    made = make_reader(tmp_path, {"PYTHONPATH": str(tmp_path)})
    yield made
    made.stop()
    down = [sys.executable, "-m", "everstate.cli", "-C", str(tmp_path), "down"]
    subprocess.run(down, check=True, capture_output=True)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [
        "own-entity-type.md",
        "commands.md",
        "rest.md",
        "drift.md",
        "outbox.md",
        "clean.md",
    ],
)
def test_a_howto_does_what_it_says(reader: Any, page: str) -> None:
    assert reader.follow(DOCS / "howto" / page) >= 4


@pytest.mark.timeout(600)
def test_the_capture_howto_does_what_it_says(reader: Any, database: str, tmp_path: Path) -> None:
    reader.env = {**reader.env, "SHOP_DSN": database}
    try:
        assert reader.follow(DOCS / "howto" / "cdc.md") > 8
    finally:
        Stack(load(tmp_path), also=("connect",)).stop(("connect",))


@pytest.mark.timeout(600)
@pytest.mark.kafka
@pytest.mark.postgres
@pytest.mark.parametrize(("page", "blocks"), [("import-a-file.md", 5), ("own-servers.md", 2)])
def test_a_howto_does_what_it_says_for_who_has_nothing(alone: Any, page: str, blocks: int) -> None:
    assert alone.follow(DOCS / "howto" / page) == blocks
