"""One word, one meaning: pages and messages use the words of the glossary, and no private ones."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "everstate"
GLOSSARY = ROOT / "docs" / "explanation" / "glossary.md"
# Each has a plain word: report or show; discard; status or position; repair; be behind; record.
PRIVATE = re.compile(
    r"\b(tells?|told|telling|giv(?:e|es|en|ing) up|gave up|stands?|stood|standing|noted|"
    r"mend(?:s|ed|ing)?|trails|trailed|bur(?:y|ies|ied)|graves?|lets? go)\b",
    re.IGNORECASE,
)
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)
_WORD = re.compile(r"^\| (\*\*.+?) \|", re.MULTILINE)


def private_words(text: str) -> list[str]:
    """Private words in the prose of a page, outside its code and links."""
    return [found.group(0) for found in PRIVATE.finditer(_CODE.sub(" ", text))]


def printed(source: str) -> Iterator[str]:
    """Texts of a module that a user may see: strings of several words that are no docstrings."""
    tree = ast.parse(source)
    notes = {
        id(each.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for each in node.body
        if isinstance(each, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if " " in node.value and id(node) not in notes:
                yield node.value


def defined(page: str) -> list[str]:
    """The words of the glossary."""
    return [
        word.strip()
        for cell in _WORD.findall(page)
        for word in re.split(r",\s+| / ", cell.replace("**", ""))
    ]


def test_pages_and_messages_have_few_private_words() -> None:
    """Fewer than 20 in all that a user reads; each that goes may not come back."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *PACKAGE.rglob("README.md")]
    pages += ROOT.glob("examples/**/*.md")
    modules = [
        path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "testing"
    ]
    texts = [(page, page.read_text("utf-8")) for page in pages]
    texts += [(path, text) for path in modules for text in printed(path.read_text("utf-8"))]
    found = [
        (str(path.relative_to(ROOT)), word) for path, text in texts for word in private_words(text)
    ]
    assert len(pages) > 80
    assert len(modules) > 300
    assert len(found) < 20, found


def test_each_word_of_the_glossary_is_defined_once() -> None:
    words = defined(GLOSSARY.read_text("utf-8"))
    assert len(words) > 40
    assert sorted(word for word in set(words) if words.count(word) > 1) == []


def test_each_word_of_the_glossary_is_used() -> None:
    """A word that neither a page nor the code uses needs no definition."""
    files = [*ROOT.glob("docs/**/*.md"), *PACKAGE.rglob("*.py")]
    used = " ".join(
        path.read_text("utf-8").lower().replace("_", " ") for path in files if path != GLOSSARY
    )
    used = re.sub(r"\s+", " ", used)
    assert [word for word in defined(GLOSSARY.read_text("utf-8")) if word not in used] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The relay tells it, and `tells` nothing.", ["tells"]),
        ("It is given up.\n\n```python\nstand = 1\n```\n", ["given up"]),
        ("A trailing view; its understanding; [a](tell.md).", []),
    ],
)
def test_a_private_word_is_found_in_prose(text: str, words: list[str]) -> None:
    assert private_words(text) == words


def test_printed_texts_are_no_docstrings() -> None:
    source = 'def f():\n    """It tells."""\n    raise E(f"{1} is mended", advice="Tell us.")\n'
    assert [private_words(text) for text in printed(source)] == [["mended"], ["Tell"]]


def test_a_word_that_is_defined_twice_is_found() -> None:
    page = "| **key** | … |\n| **part, offset** | … |\n| **a** / **key** | … |\n"
    assert defined(page) == ["key", "part", "offset", "a", "key"]
