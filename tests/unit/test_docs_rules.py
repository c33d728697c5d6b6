"""Every law and rule that code, tests or pages cite is explained, and names tests that exist."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "rules.md"
_CITED = re.compile(r"\b([CV]\d{1,2}|[Ll]aw \d{1,2})\b")
_RULE = re.compile(r"^\*\*([CV]\d{1,2}|Law \d{1,2})\. ", re.MULTILINE)
_TEST = re.compile(r"`(test_\w+)`")
_WHERE = ("src/**/*.py", "src/**/*.md", "src/**/*.sql", "tests/**/*.py", "docs/**/*.md")


def test_every_rule_that_is_cited_is_explained() -> None:
    explained = set(_RULE.findall(PAGE.read_text("utf-8")))
    cited = {
        rule[0].upper() + rule[1:]: path.relative_to(ROOT)
        for pattern in _WHERE
        for path in ROOT.glob(pattern)
        for rule in _CITED.findall(path.read_text("utf-8"))
    }
    assert {rule: path for rule, path in cited.items() if rule not in explained} == {}
    assert len(cited) > 40


def test_each_law_names_its_test() -> None:
    laws = PAGE.read_text("utf-8").partition("## The laws")[2].partition("\n## ")[0]
    shown = [part for part in laws.split("\n\n") if part.startswith("**Law")]
    assert len(shown) == 10
    assert [law for law in shown if not _TEST.search(law)] == []


def test_each_rule_of_what_is_built_names_its_test() -> None:
    built, _, planned = PAGE.read_text("utf-8").partition("## Rules of what is not built")
    rules = [part for part in built.split("\n\n") if _RULE.match(part)]
    assert [rule for rule in rules if not _TEST.search(rule)] == []
    assert len(rules) > 40
    assert planned
    assert not _TEST.search(planned)


def test_the_tests_that_the_rules_name_exist() -> None:
    named = set(_TEST.findall(PAGE.read_text("utf-8")))
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("src/everstate/testing/*.py")]
    written = "".join(path.read_text("utf-8") for path in files)
    assert {name for name in named if f"def {name}(" not in written} == set()
    assert len(named) > 60


_CODE_SPAN = re.compile(r"`[^`]*`")


def test_prose_of_pages_has_at_most_120_columns() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in _pages()
        for number, line in _prose(path.read_text("utf-8"))
        if len(line) > 120 and " " in _CODE_SPAN.sub("", line).strip()
    ]
    assert long == []


def _pages() -> list[Path]:
    listed = subprocess.check_output(("git", "ls-files", "*.md"), cwd=ROOT, text=True)
    return [ROOT / name for name in listed.splitlines()]


def _prose(page: str) -> Iterator[tuple[int, str]]:
    """Lines outside of code and tables, with their numbers."""
    is_code = False
    for number, line in enumerate(page.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.lstrip().startswith("|"):
            yield number, line
