"""A project imports what it needs from `everstate`; what is not used is not loaded."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import everstate

ROOT = Path(__file__).parents[2]
_NAMES = re.findall(
    r"^    from (\S+) import (\w+) as \2$",
    (ROOT / "src/everstate/__init__.py").read_text("utf-8"),
    re.MULTILINE,
)
_WITHIN = re.compile(r"^ *from (everstate\.\S+) import (.+)$", re.MULTILINE)
_TOP = re.compile(r"^ *from everstate import (.+)$", re.MULTILINE)
_PUBLIC = ROOT / "docs" / "reference" / "python.md"


def written() -> list[Path]:
    """What a user copies: pages, examples, and the files of a new project."""
    templates = ROOT / "src/everstate/cli/templates"
    pages = (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
    programs = (*ROOT.glob("examples/**/*.py"), *templates.rglob("*.py"))
    return [path for path in (*pages, *programs) if "decisions" not in path.parts]


def imports(text: str) -> set[tuple[str, str]]:
    """Names that a text imports from everstate, each with its module."""
    found = [("everstate", names) for names in _TOP.findall(text)] + _WITHIN.findall(text)
    return {(module, name) for module, names in found for name in names.split(", ")}


def public(page: str) -> set[tuple[str, str]]:
    """Names that the page of the Python API documents."""
    other = re.findall(r"^\| `(everstate[\w.]*)` \| `(\w+)", page, re.MULTILINE)
    return {("everstate", name) for name in re.findall(r"^### (\w+)$", page, re.MULTILINE)} | {
        *other
    }


def test_every_name_that_type_checkers_see_is_there() -> None:
    assert len(_NAMES) > 20
    for module, name in _NAMES:
        found = getattr(everstate, name)
        assert found is getattr(sys.modules[module], name)


def test_an_import_of_everstate_loads_nothing_else() -> None:
    code = "import sys, everstate; print(sorted(n for n in sys.modules if 'everstate' in n))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['everstate', 'everstate.lazily']"


def test_pages_and_examples_import_from_the_top_what_is_there() -> None:
    known = {(module, name) for module, name in _NAMES}
    deeper = []
    for page in written():
        for module, names in _WITHIN.findall(page.read_text("utf-8")):
            found = [name for name in names.split(", ") if (module, name) in known]
            deeper += [f"{page.relative_to(ROOT)}: {module} {name}" for name in found]

    assert deeper == []


def test_pages_and_examples_import_public_names_only() -> None:
    """Everything that a page shows is documented in docs/reference/python.md."""
    documented = public(_PUBLIC.read_text("utf-8"))
    assert {("everstate", name) for _, name in _NAMES} <= documented
    for page in written():
        found = imports(page.read_text("utf-8"))
        assert found <= documented, f"{page.relative_to(ROOT)}: {found - documented}"


def test_a_name_that_is_not_public_is_noticed() -> None:
    page = "### App\n\n| `everstate.client` | `Client(url)` | … |\n| `put(key)` | … |\n"
    assert public(page) == {("everstate", "App"), ("everstate.client", "Client")}
    program = "from everstate import App, connect\n    from everstate.client import Client\n"
    assert imports(program) - public(page) == {("everstate", "connect")}
