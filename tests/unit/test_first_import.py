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
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.py")):
        if "decisions" in page.parts:
            continue
        for module, names in _WITHIN.findall(page.read_text("utf-8")):
            found = [name for name in names.split(", ") if (module, name) in known]
            deeper += [f"{page.relative_to(ROOT)}: {module} {name}" for name in found]

    assert deeper == []
