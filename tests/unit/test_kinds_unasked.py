"""Nobody asks of which kind a view is, or how its table is merged, outside the registries."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "everstate"
REGISTRIES = ("views/kinds/", "views/stores/", "views/plan.py")
"""Kinds, stores, and the ways to declare views: here a kind or a merge is chosen."""


def kinds() -> set[str]:
    """Classes of plans, definitions and kept tables."""
    found = {"KeptTable", "ViewPlan"}
    trees = [ast.parse(path.read_text("utf-8")) for path in (PACKAGE / "views").rglob("*.py")]
    nodes = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    found |= {node.name for node in nodes if node.name.endswith("Definition")}
    for _ in range(4):  # classes of classes
        found |= {n.name for n in nodes if found & {ast.unparse(base) for base in n.bases}}
    return found


def asked(source: str, known: set[str]) -> Iterator[int]:
    """Lines that ask for the class of a plan, or compare a merge."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            names = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
            if names & known:
                yield node.lineno
        elif isinstance(node, ast.Compare):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            if any(side.endswith(".merge") for side in sides):
                yield node.lineno


def test_no_other_file_asks_for_a_kind_or_a_merge() -> None:
    known = kinds()
    assert {"RowPlan", "JoinSumsPlan", "PythonTable", "TimelineDefinition"} <= known
    found = [
        f"{name}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not (name := str(path.relative_to(PACKAGE))).startswith(REGISTRIES)
        for line in asked(path.read_text("utf-8"), known)
    ]
    assert found == [], "add a property to the plan, which every kind answers"


def test_a_file_that_asks_is_found() -> None:
    source = 'isinstance(a, RowPlan)\nisinstance(a, int)\nb.table.merge == "row"\nmerge == 1\n'
    assert list(asked(source, {"RowPlan"})) == [1, 3]
