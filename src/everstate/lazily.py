"""Packages whose modules are imported when one of their names is first used.

An app imports the declarations of all sources, and a command uses few of them: importing all
modules of a package for one of its names would take most of a short command's time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path


def loader(package: str) -> Callable[[str], object]:
    """The ``__getattr__`` of a package: its names are those that it imports for type checkers.

    The package has ``if TYPE_CHECKING:`` with imports of them, and this reads them there. A name of
    a module of the package is not allowed: Python sets it to the module at that module's import.
    Cost: the package's text is parsed once, when a name is first used (about 1 ms).
    """

    def find(name: str) -> object:
        module = _homes(package).get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    return find


@cache
def _homes(package: str) -> dict[str, str]:
    """The module of each name that a package imports for type checkers."""
    import ast  # here, because `import everstate` alone needs no name

    text = Path(str(sys.modules[package].__file__)).read_text("utf-8")
    found = {
        alias.name: str(node.module)
        for block in ast.parse(text).body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert not {module.rpartition(".")[2] for module in found.values()} & found.keys()
    return found
