"""Somebody new finds their way: README → a row of the architecture page → a file that answers."""

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
    """Files and folders, of the package or the project, that a text names and that do not exist."""
    package = ROOT / "src" / "everstate"
    return [
        name
        for line in text.splitlines()
        for name in NAMED.findall(line)
        if not (package / name).exists()
        and not (ROOT / name).exists()
        # `mapping.py` after `sources/cdc/stream.py` is in the same folder.
        and not any((package / each).parent.joinpath(name).exists() for each in NAMED.findall(line))
    ]


def rows() -> dict[str, list[str]]:
    """Questions of the page, and the files that each row names."""
    cells = (line.strip("|").split(" | ") for line in section().splitlines() if "? |" in line)
    return {question.strip(): NAMED.findall(answer) for question, answer in cells}


# Ten questions of somebody new; the first file of the row must have the words of the answer.
QUESTIONS = {
    "Where does a version number come from?": "version",
    "Where is a duplicate recognised?": "verdict.duplicates.append",
    "What happens to a record that cannot be read?": "why it cannot be read",
    "What happens to a value that does not fit the model?": "what fits it",
    "What is read after a kill?": "the next offset",
    "How does a captured row become a change?": "Clean: the raw log of a capture becomes changes",
    "Where would I add a verb?": "VERBS",
    "Where would I add a kind of view?": "class ViewPlan",
    "Where would I add a way in?": "What a way in is",
    "Where would I add a store?": "class ViewStore",
    "Who compares a view with its definition?": "a kept view equals its definition",
    "Where does an error become an HTTP answer, or an exit code?": "exit_code",
}


def test_step_one_the_readme_leads_to_the_table() -> None:
    assert "(docs/explanation/architecture.md#where-to-look)" in (ROOT / "README.md").read_text(
        "utf-8"
    )


@pytest.mark.parametrize("question", QUESTIONS)
def test_steps_two_and_three_a_row_leads_to_the_file_that_answers(question: str) -> None:
    first = ROOT / "src" / "everstate" / rows()[question][0]
    files = sorted(first.rglob("*.py")) if first.is_dir() else [first]
    assert QUESTIONS[question] in "".join(file.read_text("utf-8") for file in files)


def test_every_question_has_a_file() -> None:
    assert len(rows()) >= len(QUESTIONS)
    assert [question for question, files in rows().items() if not files] == []


def test_every_file_that_the_page_names_exists() -> None:
    whole = PAGE.read_text("utf-8")
    way = whole.partition("## The way of one change")[2].partition("\n## ")[0]
    assert len(NAMED.findall(way)) > 10
    assert missing(way.rpartition("```")[2]) == []
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
