"""How many processor seconds each test file is meant to take, and the order in which files run.

``python tests/budgets.py`` takes what the last run used as the budgets.
"""

from __future__ import annotations

import ast
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    import pytest

OVER: Final = 1.5
"""A file that takes so many times its budget is named at the end of the run."""
SLACK_S: Final = 5.0
"""Processor seconds more, for any file: small files are not measured exactly."""
UNLISTED_S: Final = 2.0
"""The budget of a file that the list does not name."""
_ALONE: Final = ("cassandra", "opensearch")
_TOGETHER: Final = (*_ALONE, "connect", "mariadb", "mysql")
"""Servers that only one worker should start: the files that use them run one after the other."""
_ROUNDS: Final = 5


@dataclass(frozen=True)
class Budgets:
    """The committed budgets: file → processor seconds, measured on a machine of some speed."""

    root: Path
    loop_s: float
    """What :func:`loop_s` took on the machine on which the budgets were measured."""
    files: Mapping[str, float]
    _units: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path, path: Path) -> Self:
        """The budgets of a file."""
        told = json.loads((root / path).read_text("utf-8"))
        return cls(root, told["loop_s"], told["files"])

    def of(self, name: str) -> float:
        """Processor seconds of one file."""
        return self.files.get(name, UNLISTED_S)

    def over(self, used: Mapping[str, float], loop: float) -> list[str]:
        """One line per file that took too much, on a machine where the loop takes ``loop`` s."""
        slower = max(1.0, loop / self.loop_s)
        lines = []
        for name, cpu_s in used.items():
            limit = (OVER * self.of(name) + SLACK_S) * slower
            if cpu_s > limit:
                lines.append(
                    f"{name} took {cpu_s:.0f} processor seconds; its budget in tests/budgets.json "
                    f"is {self.of(name):g}, which comes to at most {limit:.0f} here."
                )
        return lines

    def unit(self, name: str) -> str:
        """What a file is scheduled with: itself, or all that need one of the rarer servers."""
        if name not in self._units:
            wanted = fixtures_named(self.root / name)
            shared = [server for server in _TOGETHER if server in wanted]
            # MariaDB is there to be captured from: its files go with those of Connect.
            alone = [server for server in _ALONE if server in shared]
            self._units[name] = alone[0] if alone else "connect" if shared else name
        return self._units[name]

    def order(self, names: Iterable[str]) -> dict[str, tuple[float, str, float, str]]:
        """By what to sort the files: the longest units first."""
        listed = list(names)
        units: dict[str, float] = defaultdict(float)
        for name in listed:
            units[self.unit(name)] += self.of(name)
        return {
            name: (-units[self.unit(name)], self.unit(name), -self.of(name), name)
            for name in listed
        }


def fixtures_named(path: Path) -> set[str]:
    """Names that the functions of a test file take as arguments, or ask for by name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef):
            found.update(argument.arg for argument in node.args.args)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "getfixturevalue" and isinstance(node.args[0], ast.Constant):
                found.add(str(node.args[0].value))
    return found


def loop_s() -> float:
    """Processor seconds of a fixed piece of work, at best: how quick this machine is now."""
    best = float("inf")
    for _ in range(_ROUNDS):
        began, found = time.process_time(), {}
        for number in range(10_000):
            text = json.dumps({"key": f"k{number}", "version": number})
            found[text] = sha256(text.encode()).digest()
        best = min(best, time.process_time() - began)
    return best


def make_scheduler(config: pytest.Config, log: Any, budgets: Budgets) -> Any:
    """A scheduler of pytest-xdist that gives a worker one unit of files after the other."""
    from xdist.scheduler import LoadScopeScheduling

    class InUnits(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return budgets.unit(nodeid.partition("::")[0])

    return InUnits(config, log)


def take(root: Path) -> None:
    """Write the budgets anew, from what the files of the last run used."""
    told = json.loads((root / "test-results" / "files.json").read_text("utf-8"))
    used = {name: each["cpu_s"] for name, each in told["files"].items() if name.endswith(".py")}
    files = {name: math.ceil(used[name]) for name in sorted(used) if used[name] > UNLISTED_S}
    written = {"loop_s": round(told["loop_s"], 4), "files": files}
    (root / "tests" / "budgets.json").write_text(json.dumps(written, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    take(Path(__file__).parents[1])
