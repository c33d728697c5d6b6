"""The form of the code: short functions and files, one reader of the environment, no addresses."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import jgo.constants
import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "everstate"
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 600
FORBIDDEN_NAMES = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}
MAY_READ_ENVIRONMENT = ("config.py", "local")
"""The settings; and the stack, which hands the environment on to its servers."""
REGISTRIES = (
    "py" + "pi.org",
    "files.python" + "hosted.org",
    "maven" + ".org",
    "maven.apache" + ".org",
    "registry." + "npm",
    "docker" + ".io",
    urlsplit(jgo.constants.MAVEN_CENTRAL_URL).hostname or "",
)
MACHINE_PATHS = re.compile(r"(?<![\w.<$])/(?:home|root|Users|work)/[a-z]")


@cache
def project_files() -> tuple[Path, ...]:
    """Files that git knows or would add."""
    listed = subprocess.run(
        ("git", "ls-files", "--cached", "--others", "--exclude-standard"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return tuple(ROOT / name for name in listed if (ROOT / name).is_file())


def python_files(*folders: str) -> list[Path]:
    """Python files of the project, in all folders or in those."""
    wanted = [ROOT / folder for folder in folders] or [ROOT]
    return [
        path
        for path in project_files()
        if path.suffix == ".py" and any(path.is_relative_to(folder) for folder in wanted)
    ]


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def where(path: Path, line: int | None = None) -> str:
    place = str(path.relative_to(ROOT))
    return place if line is None else f"{place}:{line}"


def test_functions_are_short() -> None:
    long = []
    for path in python_files():
        for function in functions(path):
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                long.append(f"{where(path, function.lineno)} {function.name}: {lines} lines")
    assert long == []


def test_the_command_line_prints_through_one_console_that_makes_text_safe() -> None:
    own = re.compile(
        r"rich\.markup|import Console\b|\bConsole\(|(?<![.\w])print\(|click\.echo|typer\.echo"
    )
    found = [
        where(path)
        for path in python_files("src/everstate/cli")
        if path.name != "console.py" and own.search(path.read_text("utf-8"))
    ]
    assert found == []


def test_files_are_short() -> None:
    lengths = {where(path): len(path.read_text("utf-8").splitlines()) for path in python_files()}
    assert {name: lines for name, lines in lengths.items() if lines > FILE_LINES_MAX} == {}


def test_no_file_is_named_after_nothing() -> None:
    assert [where(path) for path in python_files() if path.name in FORBIDDEN_NAMES] == []


def handed_on(tree: ast.Module) -> set[int]:
    """Uses of the environment that read no setting: set for a child, or given to it whole."""
    uses: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            uses.add(id(node.value))
        elif isinstance(node, ast.keyword) and node.arg == "env":
            uses.update(id(part) for part in ast.walk(node.value))
    return uses


def test_only_the_settings_read_the_environment() -> None:
    readers = []
    for path in python_files("src"):
        if path.relative_to(PACKAGE).parts[0] in MAY_READ_ENVIRONMENT:
            continue
        tree = ast.parse(path.read_text("utf-8"))
        allowed = handed_on(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or id(node) in allowed:
                continue
            if node.attr in ("environ", "getenv"):
                readers.append(where(path, node.lineno))
    assert readers == []


def swallows_everything(handler: ast.ExceptHandler) -> bool:
    """Whether a handler takes any error, and neither raises it again nor does anything with it."""
    caught = set() if handler.type is None else set(re.findall(r"\w+", ast.unparse(handler.type)))
    if handler.type is not None and not {"Exception", "BaseException"} & caught:
        return False
    parts = [part for line in handler.body for part in ast.walk(line)]
    raised = any(isinstance(part, ast.Raise) for part in parts)
    used = any(isinstance(part, ast.Name) and part.id == handler.name for part in parts)
    return not raised and not used


def test_library_code_swallows_no_exception_that_it_does_not_know() -> None:
    swallowed = [
        where(path, node.lineno)
        for path in python_files("src")
        if "testing" not in path.relative_to(PACKAGE).parts
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ExceptHandler) and swallows_everything(node)
    ]
    assert swallowed == []


@pytest.mark.parametrize(
    ("handler", "swallows"),
    [
        ("except: pass", True),
        ("except Exception: pass", True),
        ("except (ValueError, Exception) as e: print('oops')", True),
        ("except ValueError: pass", False),
        ("except BaseException: raise", False),
        ("except Exception as e: self.error = e", False),
    ],
)
def test_a_handler_that_swallows_is_known(handler: str, swallows: bool) -> None:
    (found,) = (
        node
        for node in ast.walk(ast.parse(f"try: x()\n{handler}"))
        if isinstance(node, ast.ExceptHandler)
    )
    assert swallows_everything(found) is swallows


def test_every_room_has_a_readme() -> None:
    rooms = {path.relative_to(PACKAGE).parts[0] for path in python_files("src")}
    folders = [PACKAGE / room for room in sorted(rooms) if (PACKAGE / room).is_dir()]
    assert [room.name for room in folders if not (room / "README.md").is_file()] == []


def test_test_files_have_names_of_their_own() -> None:
    names = [path.name for path in python_files("tests") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))


def test_no_test_is_skipped_for_good() -> None:
    marks = re.compile(r"@pytest\.mark\.skip\b|pytest\.xfail\(|@pytest\.mark\.xfail")
    marked = [where(p) for p in python_files("tests") if marks.search(p.read_text("utf-8"))]
    assert [name for name in marked if not name.endswith("test_tidy.py")] == []


@pytest.mark.parametrize("mark", ["TO" + "DO", "FIX" + "ME", "X" + "XX"])
def test_nothing_is_left_for_later(mark: str) -> None:
    found = re.compile(rf"\b{mark}\b")
    assert [where(p) for p in python_files() if found.search(p.read_text("utf-8"))] == []


def test_no_registry_and_no_path_of_a_machine_is_written_down() -> None:
    found = []
    for path in project_files():
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{where(path)}: {name}" for name in REGISTRIES if name and name in text]
        if path.suffix in (".py", ".toml", ".lock", ".json", ".yaml", ".yml", ""):
            found += [f"{where(path)}: {hit}" for hit in MACHINE_PATHS.findall(text)]
    assert found == []


def test_no_setting_of_the_user_reaches_the_tests() -> None:
    """A run with `EVERSTATE_STORE_DSN` set would drop databases of somebody's own server."""
    kept = {"EVERSTATE_BENCH_DATA"}
    assert {name for name in os.environ if name.startswith("EVERSTATE_")} <= kept
