"""Packages whose modules are imported when one of their names is first used.

An app imports the declarations of all sources, and a command uses few of them: importing all
modules of a package for one of its names would take most of a short command's time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def loader(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """The ``__getattr__`` of a package; ``names``: module → names that the package gets from it.

    For type checkers the package imports the same names under ``TYPE_CHECKING``. A name of a
    module of the package is not allowed: Python sets it to the module at that module's import.
    """
    home = {name: module for module, found in names.items() for name in found}
    assert not {module.rpartition(".")[2] for module in names} & home.keys()

    def find(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
