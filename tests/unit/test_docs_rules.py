"""Every rule that code, tests or pages cite is explained, and names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "rules.md"
_CITED = re.compile(r"\b([CV]\d{1,2})\b")
_RULE = re.compile(r"^\*\*([CV]\d{1,2})\. ", re.MULTILINE)
_TEST = re.compile(r"`(test_\w+)`")
_WHERE = ("src/**/*.py", "src/**/*.md", "src/**/*.sql", "tests/**/*.py", "docs/**/*.md")


def test_every_rule_that_is_cited_is_explained() -> None:
    explained = set(_RULE.findall(PAGE.read_text("utf-8")))
    cited = {
        rule: path.relative_to(ROOT)
        for pattern in _WHERE
        for path in ROOT.glob(pattern)
        for rule in _CITED.findall(path.read_text("utf-8"))
    }
    assert {rule: path for rule, path in cited.items() if rule not in explained} == {}
    assert len(cited) > 30


def test_the_tests_that_the_rules_name_exist() -> None:
    named = set(_TEST.findall(PAGE.read_text("utf-8")))
    files = [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("src/everstate/testing/*.py")]
    written = "".join(path.read_text("utf-8") for path in files)
    assert {name for name in named if f"def {name}(" not in written} == set()
    assert len(named) > 60
