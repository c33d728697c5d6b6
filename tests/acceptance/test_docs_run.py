"""Every page that shows how to do something is done."""

from __future__ import annotations

import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstate.config import load
from everstate.local import Stack

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def reader(stack: Any, database: str, tmp_path: Path, make_reader: Any) -> Iterator[Any]:
    """A reader with an empty project folder, on the servers of this run."""
    env = {
        "EVERSTATE_LOG_BOOTSTRAP_SERVERS": stack.bootstrap_servers,
        "EVERSTATE_STORE_DSN": database,
        "EVERSTATE_LOG_PREFIX": f"t{uuid.uuid4().hex[:12]}",
        "EVERSTATE_PIPELINE_MASTER": "local[2]",
        "EVERSTATE_PIPELINE_DRIVER_MEMORY": "2g",
        "PYTHONPATH": str(tmp_path),
    }
    made = make_reader(tmp_path, env)
    yield made
    made.stop()


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


@pytest.mark.timeout(900)
def test_the_migration_goes_forward_and_back_with_writes_running(
    reader: Any, tmp_path: Path
) -> None:
    for file in (DOCS.parent / "examples" / "migrate").iterdir():
        shutil.copy(file, tmp_path)
    assert reader.follow(DOCS / "howto" / "migrate.md") == 7
    # Some hundred writes were acknowledged while the service moved.
    assert len((tmp_path / "acknowledged.jsonl").read_text("utf-8").splitlines()) > 200
