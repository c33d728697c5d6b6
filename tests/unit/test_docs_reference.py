"""The documentation is under test: generated pages are fresh, links lead somewhere, code parses."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from everstate.changes.codec import WIRE_FIELDS, WireProvenance
from everstate.cli import cli
from everstate.cli.verbs import VERBS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted({ROOT / "README.md", *DOCS.rglob("*.md")})
_LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(?:#[^)]*)?\)")
_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_names_of_a_switch_are_in_the_reference() -> None:
    page = (DOCS / "reference" / "cli.md").read_text("utf-8")
    assert all(f"`--no-{name}`" in page for name in ("wait", "against-log", "cluster", "snapshot"))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_generated_pages_say_what_the_code_says() -> None:
    pages = generator().pages().items()
    wrong = [name_of(page) for page, text in pages if page.read_text("utf-8") != text]
    assert wrong == [], "run python docs/generate.py"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    for target in _LINK.findall(page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_python_block_of_a_page_parses(page: Path) -> None:
    for language, code in _FENCE.findall(page.read_text("utf-8")):
        if language == "python":
            ast.parse(code)


_COMMAND = re.compile(r"(?<![\w./-])everstate ([a-z]+(?: [a-z-]+)?)")


def test_every_command_that_a_message_or_a_page_names_is_there() -> None:
    """An error's advice that nobody can follow is worse than none."""
    groups: dict[str, set[str]] = {}
    for verb in VERBS:
        command = cli_command(verb)
        groups[verb] = set(getattr(command, "commands", ()))
    unknown = set()
    for file in [*PAGES, *(ROOT / "src").rglob("*.py")]:
        text = re.sub(r'["`]\n\s+f?["`]', "", file.read_text("utf-8"))
        for code in re.findall(r"`(everstate [^`\n]+)`", text):
            for said in _COMMAND.findall(code):
                verb, _, more = said.partition(" ")
                if verb not in groups or (groups[verb] and more and more not in groups[verb]):
                    unknown.add(f"{name_of(file)}: {said}")
    assert unknown == set()
    assert "log" in groups
    assert "begin" in groups["log"]


def cli_command(name: str) -> Any:
    group: Any = typer.main.get_command(cli)
    return group.commands[name]


def test_the_envelope_page_tells_every_field() -> None:
    page = (DOCS / "reference" / "envelope.md").read_text("utf-8")
    provenance = {"apiVersion", "serviceName", "identifier", "actor", "reason", "transaction"}
    assert {name for name in WIRE_FIELDS | provenance if name not in page} == set()
    assert provenance - set(WireProvenance.__struct_encode_fields__) == set()


def test_every_page_of_the_documentation_is_reached_from_the_readme() -> None:
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in reached or page.suffix != ".md" or not page.is_file():
            continue
        reached.add(page)
        links = _LINK.findall(page.read_text("utf-8"))
        ahead += [(page.parent / target).resolve() for target in links if "://" not in target]
    assert {name_of(page) for page in PAGES if page not in reached} == set()


def test_the_example_is_the_one_of_the_howto() -> None:
    howto = [DOCS / "howto" / name for name in ("own-entity-type.md", "rest.md")]
    page = "".join(each.read_text("utf-8") for each in howto)
    for file in (ROOT / "examples" / "hotel").iterdir():
        code = file.read_text("utf-8")
        if file.suffix != ".md":
            assert re.sub(r'\A""".*?"""\n\n', "", code) in page, file.name


def test_every_setting_says_what_it_is() -> None:
    lines = (DOCS / "reference" / "config.md").read_text("utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) > 30
    assert [row for row in rows if not row.endswith(". |")] == []
    assert [row for row in rows if re.search(r"`(True|False|None)` \| `EVERSTATE", row)] == []


def test_what_goes_wrong_has_its_paragraph() -> None:
    """Each error that an operator, and not a caller, has to mend."""
    page = (DOCS / "howto" / "when-something-is-wrong.md").read_text("utf-8")
    named = {
        "ArchiveError",
        "ArchiveFull",
        "DataLoss",
        "Fenced",
        "HeldOverflow",
        "LocalStackError",
        "LogIdentityChanged",
        "PipelineError",
        "RecordRefused",
        "Unavailable",
        "VerificationFailed",
        "ViewFailed",
        "ViewStoreError",
    }
    assert {name for name in named if f"`{name}`" not in page} == set()
