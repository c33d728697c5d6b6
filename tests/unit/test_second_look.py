"""A test that fails once is flaky and named; one that fails twice, or eleven at once, are red."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from second_look import FAILED_MAX

TESTS = Path(__file__).parents[1]
FAILS_ONCE = """
from pathlib import Path

def test_right():
    pass

def test_busy(request):
    marker = Path(__file__).with_suffix(".seen")
    seen, _ = marker.exists(), marker.touch()
    assert seen, "the server was not there yet"
"""
LOOK = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import second_look
outcome = second_look.run(sys.argv[1:])
outcome.tell()
sys.exit(outcome.code)
"""
FAILS_ALWAYS = "def test_wrong():\n    assert 1 == 2\n"


@dataclass(frozen=True)
class Told:
    code: int
    said: str
    flaky: dict[str, str]


def suite(folder: Path, *arguments: str, **files: str) -> Told:
    """What a suite of these files comes to, run with the driver and the plugins of ours."""
    (folder / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n"
        'pytest_plugins = ("second_look", "measuring")\n' + files.pop("conftest", "")
    )
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test-results").mkdir(exist_ok=True)
    ended = subprocess.run(
        [sys.executable, "-c", LOOK, *arguments],
        cwd=folder,
        # Plugins that these small suites do not need take most of the time.
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    flaky = json.loads((folder / "test-results" / "flaky.json").read_text())
    return Told(ended.returncode, ended.stdout + ended.stderr, flaky)


@pytest.mark.parametrize("arguments", [(), ("-p", "xdist", "-n", "1")])
def test_a_test_that_fails_once_is_named_as_flaky_and_the_run_is_green(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    told = suite(tmp_path, *arguments, once=FAILS_ONCE)
    assert told.code == 0, told.said
    (name,) = told.flaky
    assert name == "test_once.py::test_busy"
    assert "the server was not there yet" in told.said.partition("flaky: test_once.py")[2]
    assert told.said.endswith("2 passed, 0 failed, 1 of the passed are flaky\n")


def test_a_test_that_fails_twice_is_red(tmp_path: Path) -> None:
    told = suite(tmp_path, once=FAILS_ONCE, wrong=FAILS_ALWAYS)
    assert told.code == pytest.ExitCode.TESTS_FAILED
    assert list(told.flaky) == ["test_once.py::test_busy"]
    assert told.said.endswith("2 passed, 1 failed, 1 of the passed are flaky\n")


def test_a_fixture_that_fails_gets_a_second_look_too(tmp_path: Path) -> None:
    broken = "import pytest\n@pytest.fixture\ndef it():\n    1 / 0\ndef test_it(it):\n    pass\n"
    told = suite(tmp_path, broken=broken)
    assert told.code == pytest.ExitCode.TESTS_FAILED
    assert "second look at 1 failed tests" in told.said


OPTIONS = """
def pytest_addoption(parser):
    parser.addoption("--full", action="store_true")

def pytest_collection_modifyitems(config, items):
    if not config.getoption("full"):
        items.clear()
"""


def test_the_second_look_has_the_tier_of_the_first(tmp_path: Path) -> None:
    told = suite(tmp_path, "--full", conftest=OPTIONS, once=FAILS_ONCE)
    assert told.code == 0, told.said
    assert list(told.flaky) == ["test_once.py::test_busy"]


def test_a_unit_test_that_starts_a_server_is_red_beside_a_flaky_test(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "unit"
    folder.mkdir(parents=True)
    # The outer run sees this process too, and takes no program of this name for a server.
    server = folder / "planted"
    shutil.copy("/bin/sleep", server)
    (folder / "test_server.py").write_text(
        "import subprocess, time\n"
        f"def test_it():\n    subprocess.Popen([{str(server)!r}, '60'])\n    time.sleep(3)\n"
    )
    counted = 'import processes_seen\nprocesses_seen.SERVERS.add("planted")\n'
    told = suite(tmp_path, conftest=counted, once=FAILS_ONCE)
    assert told.code == pytest.ExitCode.USAGE_ERROR
    assert "a unit test has no JVM and no server" in told.said
    assert told.flaky == {}


def test_more_than_ten_failed_tests_are_red_without_a_second_look(tmp_path: Path) -> None:
    many = "".join(f"def test_{n}():\n    assert {n} < 0\n" for n in range(FAILED_MAX + 1))
    told = suite(tmp_path, many=many)
    assert told.code == pytest.ExitCode.TESTS_FAILED
    assert "second look" not in told.said
    assert told.said.endswith("0 passed, 11 failed, 0 of the passed are flaky\n")


def test_what_cannot_be_collected_is_red_without_a_second_look(tmp_path: Path) -> None:
    told = suite(tmp_path, once=FAILS_ONCE, broken="import nothing_of_that_name\n")
    assert told.code == pytest.ExitCode.INTERRUPTED
    assert "second look" not in told.said


def test_a_file_over_its_budget_is_named_and_the_run_is_green(tmp_path: Path) -> None:
    busy = "def test_busy():\n    pass\n"
    budgets = {"loop_s": 1000.0, "files": {"test_busy.py": -10}}
    (tmp_path / "budgets.json").write_text(json.dumps(budgets))
    told = suite(tmp_path, "--budgets", "budgets.json", busy=busy)
    assert told.code == 0, told.said
    assert "test_busy.py took" in told.said
