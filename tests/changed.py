"""Which test files reach what was changed: ``python tests/changed.py [REF]`` prints them.

Changed is what differs from ``REF`` (default: where this branch left ``main``), what is not yet
committed included. A test file reaches the modules that it and its modules import, anywhere in
their code, and those that its strings name, such as the programs of child processes.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from budgets import fixtures_named

ROOT = Path(__file__).parents[1]
_ALWAYS = "tests/unit/test_tidy.py"
_EVERYTHING = ("pyproject.toml", "requirements-dev.lock", "Makefile")
_NAMED = re.compile(r"\beverstate(?:\.\w+)+")


def changed_files(since: str | None) -> set[str]:
    """Paths that differ from a commit, new files included."""
    base = since or _git("merge-base", "HEAD", "main").strip()
    new = _git("ls-files", "--others", "--exclude-standard").split()
    return {*_git("diff", "--name-only", base).split(), *new}


def files_reaching(changed: Iterable[str], root: Path) -> list[str]:
    """Test files that reach one of the changed files."""
    files = set(changed)
    tests = sorted(path.relative_to(root).as_posix() for path in root.glob("tests/**/test_*.py"))
    if files & set(_EVERYTHING):
        return tests
    tree = Tree(root)
    return [
        test for test in tests if files and (test == _ALWAYS or tree.reaches(Path(test), files))
    ]


class Tree:
    """The project's modules and what each one imports."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules = {
            _module(path.relative_to(root)): path.relative_to(root)
            for folder in ("src", "tests", "bench", "examples")
            for path in (root / folder).rglob("*.py")
        }
        self._imports = cache(self._read_imports)

    def reaches(self, test: Path, changed: set[str]) -> bool:
        """Whether a test file, or a module that it reaches, is or reads a changed file."""
        todo, known = [test, *self._fixtures(test)], set[Path]()
        while todo:
            path = todo.pop()
            if path in known:
                continue
            known.add(path)
            todo += self._imports(path)
        text = (self._root / test).read_text("utf-8")
        return any(
            self._is_read(Path(name), known, text) for name in changed if name not in _EVERYTHING
        )

    def _is_read(self, changed: Path, known: set[Path], text: str) -> bool:
        if changed in known:
            return True
        if changed.suffix == ".py" and changed.parts[0] != "examples":
            return False
        if changed.parts[0] == "src" and changed.suffix != ".md":
            # A file that the modules beside it read, such as a schema.
            return any(path.parent == changed.parent for path in known)
        # A page, an example or data, which the test reads by name or with its folder.
        return changed.name in text or changed.parent.name in _strings(text)

    def _fixtures(self, test: Path) -> Iterator[Path]:
        """The conftest files whose fixtures the test names."""
        named = fixtures_named(self._root / test)
        for folder in test.parents:
            path = folder / "conftest.py"
            if (self._root / path).is_file():
                tree = ast.parse((self._root / path).read_text("utf-8"))
                if named & {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}:
                    yield path

    def _read_imports(self, path: Path) -> list[Path]:
        found = []
        for name in _names((self._root / path).read_text("utf-8")):
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                module = self._modules.get(".".join(parts[:end]))
                if module is not None:
                    found.append(module)
        return found


def _module(path: Path) -> str:
    """The name by which a file is imported: tests and examples by their own name alone."""
    parts = path.with_suffix("").parts
    if parts[0] in ("tests", "examples"):
        return ".".join(parts[-2:]) if parts[-2] == "kit" else parts[-1]
    parts = parts[1:] if parts[0] == "src" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _names(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _NAMED.findall(node.value)


def _strings(text: str) -> set[str]:
    """Words of the string constants of a file."""
    return {
        word
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for word in re.findall(r"[\w.-]+", node.value)
    }


def _git(*words: str) -> str:
    return subprocess.run(
        ("git", *words), cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    print("\n".join(files_reaching(changed_files(sys.argv[1] if sys.argv[1:] else None), ROOT)))
