"""The page that says where to look names files that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
NAMED = re.compile(r"`([a-z_/]+\.(?:py|sql)|[a-z_]+/(?:[a-z_]+/)*)`")


def section() -> str:
    return PAGE.read_text("utf-8").partition("## Where to look")[2].partition("\n## ")[0]


def missing(text: str) -> list[str]:
    """Files and folders of the package that a text names and that do not exist."""
    package = ROOT / "src" / "everstate"
    return [
        name
        for line in text.splitlines()
        for name in NAMED.findall(line)
        if not (package / name).exists()
        # `mapping.py` after `sources/cdc/stream.py` is in the same folder.
        and not any((package / each).parent.joinpath(name).exists() for each in NAMED.findall(line))
    ]


def test_every_file_that_the_page_names_exists() -> None:
    assert len(NAMED.findall(section())) > 20
    assert missing(section()) == []


def test_the_layers_of_the_page_are_those_that_are_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    shown = PAGE.read_text("utf-8").partition("Layers (")[2].split("```")[1].split("\n")[1:-1]
    assert shown == [each.replace(" | ", " · ") for each in layers]


@pytest.mark.parametrize("name", ["views/gone.py", "gone/"])
def test_a_file_that_was_moved_is_noticed(name: str) -> None:
    assert missing(f"| where? | `views/gate.py`, `{name}` |") == [name]
