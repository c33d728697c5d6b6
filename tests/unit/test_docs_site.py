"""The documentation builds as a site: every link and anchor leads somewhere, nothing is fetched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

ROOT = Path(__file__).parents[2]
OTHER_PAGES = [
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md"))
    if not path.is_relative_to(ROOT / "docs")
]
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)
_FIGURE = re.compile(r"\b\d\d?,\d{3}\b(?!,)|\b\d+(?:\.\d+)?(?= (?:ms|bytes)\b)")
_LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(https?:)?//[^"]*""")


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config))
    return subprocess.run(
        (*command, "--site-dir", str(site)),
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def anchors(page: Path) -> Iterator[str]:
    """Anchors of a page, both on the site and where the repository is shown."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for heading in _HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading)
        shown = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        if slugify(plain, "-") == shown:
            yield shown


def broken_links(pages: Sequence[Path]) -> list[str]:
    """Links to files and anchors that do not exist."""
    broken = []
    for page in pages:
        for target in _LINK.findall(_CODE.sub("", page.read_text("utf-8"))):
            path, _, anchor = target.partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            file = page if not path else page.parent / path
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{page.name}: {target}")
    return broken


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_has_every_page_and_no_program(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert len(pages) > 60
    for page in pages:
        folder = page.parent if page.name in ("README.md", "index.md") else page.with_suffix("")
        assert (site / folder / "index.html").is_file(), page
    assert list(site.rglob("*.py")) == []


def test_the_site_loads_nothing_from_another_server(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert _LOADED.search(page.read_text("utf-8")) is None, page
    assert _LOADED.search('<link rel="stylesheet" href="https://fonts.example/css">')
    assert _LOADED.search('<script src="//cdn.example/a.js">')


def test_a_block_shows_the_name_of_its_file(site: Path) -> None:
    page = (site / "howto" / "own-entity-type" / "index.html").read_text("utf-8")
    assert '<span class="filename">hotel.py</span>' in page


@pytest.mark.parametrize(
    ("planted", "told"),
    [
        ("[nowhere](no-page.md)", "no-page.md"),
        ("[no part](other.md#no-part)", "no-part"),
        ("[absolute](/other/)", "/other/"),
    ],
)
def test_a_broken_link_stops_the_build(tmp_path: Path, planted: str, told: str) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(f"# One\n\n[two](other.md#part)\n\n{planted}\n", "utf-8")
    (docs / "other.md").write_text("# Two\n\n## Part\n", "utf-8")
    config = tmp_path / "mkdocs.yml"
    config.write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: {docs}\nhooks: []\ntheme: {{name: mkdocs}}\n"
        "nav: [index.md, other.md]\n",
        "utf-8",
    )
    done = build(config, tmp_path / "site")
    assert done.returncode != 0
    assert told in done.stderr
    (docs / "index.md").write_text("# One\n\n[two](other.md#part)\n", "utf-8")
    assert build(config, tmp_path / "site").returncode == 0


def test_links_of_pages_beside_the_site_lead_to_files_and_headings() -> None:
    assert ROOT / "README.md" in OTHER_PAGES
    assert broken_links(OTHER_PAGES) == []


def test_anchors_are_the_same_on_the_site_and_in_the_repository() -> None:
    assert broken_links(sorted((ROOT / "docs").rglob("*.md"))) == []


def test_a_planted_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(
        "# One `part`\n\n[a](#one-part) [b](README.md) [c](https://example.org)\n\n"
        "[d](gone.md) [e](#gone) [f](README.md#gone)\n\n"
        "`[g](code.md)`\n\n```md\n# Not a heading\n[h](code.md)\n```\n\n[i](#not-a-heading)\n",
        "utf-8",
    )
    assert broken_links([page]) == [
        *("README.md: gone.md", "README.md: #gone", "README.md: README.md#gone"),
        "README.md: #not-a-heading",
    ]


def test_figures_of_the_comparison_are_those_of_the_benchmarks() -> None:
    results = (ROOT / "bench" / "RESULTS.md").read_text("utf-8")
    for name in ("compared", "lambda-today", "before-and-after"):
        page = (ROOT / "docs" / "explanation" / f"{name}.md").read_text("utf-8")
        figures = set(_FIGURE.findall(page))
        assert figures, name
        assert {figure for figure in figures if figure not in results} == set(), name
