"""One name, one meaning: a class or type alias of the package has a name of its own."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "everstate"
CAMEL = re.compile(r"[A-Z]\w*[a-z]\w*")
"""A class or type alias; constants and type variables have no lower case."""


def defined(source: str) -> Iterator[str]:
    """Names of the classes of a module, wherever they are, and of its own aliases."""
    tree = ast.parse(source)
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    # Also below `if TYPE_CHECKING:` and in a `try:`, which open no scope.
    open_bodies: list[ast.stmt | ast.ExceptHandler] = list(tree.body)
    while open_bodies:
        node = open_bodies.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            parts = ast.iter_child_nodes(node)
            open_bodies += [n for n in parts if isinstance(n, ast.stmt | ast.ExceptHandler)]
    yield from (name for name in dict.fromkeys(names) if CAMEL.fullmatch(name))


def doubles(modules: Mapping[str, str]) -> dict[str, list[str]]:
    """Names that several modules define, and these modules."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module, source in modules.items():
        for name in defined(source):
            homes[name].append(module)
    return {name: found for name, found in homes.items() if len(found) > 1}


def test_no_name_is_defined_in_two_modules() -> None:
    """Rename one of them in the words of its field, or import it if it is the same thing."""
    modules = {
        str(path.relative_to(PACKAGE)): path.read_text("utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    assert len(modules) > 300
    assert doubles(modules) == {}


def test_a_name_that_is_defined_twice_is_found() -> None:
    modules = {
        "a.py": "class Place: ...\nKind = Literal['x']\nif 1:\n    Held: Any = int\n_Row = 1\n",
        "b.py": "def f():\n    class Place: ...\nclass Kind(StrEnum): ...\nT = 1\n_Row = 2\n",
        "c.py": "try: ...\nexcept ImportError:\n    Held = int\nT = 2\n",
        "d.py": "from a import Place\ndef g():\n    Kind = 1\n",
    }
    assert doubles(modules) == {
        "Place": ["a.py", "b.py"],
        "Kind": ["a.py", "b.py"],
        "Held": ["a.py", "c.py"],
    }


LOGGER = re.compile(r"^(\w+) = logging\.getLogger\(", re.MULTILINE)


def test_loggers_are_called_logger() -> None:
    named = {
        name for path in PACKAGE.rglob("*.py") for name in LOGGER.findall(path.read_text("utf-8"))
    }
    assert named == {"logger"}
