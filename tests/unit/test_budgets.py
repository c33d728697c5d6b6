"""The suite's own limits: what a file may take, the order of files, what is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from budgets import Budgets
from processes_seen import end_leftovers

ROOT = Path(__file__).parents[2]


@pytest.fixture
def budgets(tmp_path: Path) -> Budgets:
    for name, argument in (("a", "stack"), ("b", "connect"), ("c", "mariadb"), ("d", "cassandra")):
        (tmp_path / f"{name}.py").write_text(f"def test({argument}): ...\n")
    return Budgets(tmp_path, 0.02, {"a.py": 60.0, "b.py": 50.0, "c.py": 40.0})


def test_a_file_that_takes_more_than_one_and_a_half_times_its_budget_is_named(
    budgets: Budgets,
) -> None:
    assert budgets.over({"a.py": 94.0, "d.py": 7.9}, 0.02) == []
    (line,) = budgets.over({"a.py": 96.0}, 0.02)
    assert "a.py took 96 processor seconds" in line
    (line,) = budgets.over({"d.py": 8.1}, 0.02)
    assert "its budget in tests/budgets.json is 2" in line


def test_a_slower_machine_has_more_time_and_a_quicker_one_not_less(budgets: Budgets) -> None:
    assert budgets.over({"a.py": 180.0}, 0.04) == []
    assert budgets.over({"a.py": 94.0}, 0.01) == []
    assert len(budgets.over({"a.py": 192.0}, 0.04)) == 1


def test_the_longest_come_first_and_files_that_share_a_rare_server_are_together(
    budgets: Budgets,
) -> None:
    order = budgets.order(["a.py", "b.py", "c.py", "d.py"])
    assert sorted(order, key=order.__getitem__) == ["b.py", "c.py", "a.py", "d.py"]
    assert [budgets.unit(f"{name}.py") for name in "abcd"] == [
        "a.py",
        "connect",
        "connect",
        "cassandra",
    ]


def test_the_budgets_name_files_that_exist() -> None:
    listed = Budgets.read(ROOT, Path("tests/budgets.json")).files
    assert [name for name in listed if not (ROOT / name).is_file()] == []


def test_what_a_test_leaves_running_is_ended_with_what_it_started_and_nothing_else() -> None:
    sleep = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    before = set(psutil.Process().children(recursive=True))
    left, kept = (subprocess.Popen([sys.executable, "-c", sleep]) for _ in range(2))
    try:
        family = psutil.Process(left.pid)
        while not family.children():
            assert left.poll() is None
        grandchild = family.children()[0]
        ended = end_leftovers({*before, psutil.Process(kept.pid)}, [])
        assert len(ended) == 1
        assert left.wait(10) == -9
        assert psutil.wait_procs([grandchild], 10)[1] == []
        assert kept.poll() is None
    finally:
        for process in psutil.Process(kept.pid).children():
            process.kill()
        kept.kill()
        kept.wait()


_FILE = """
import os, subprocess, pytest

@pytest.fixture(scope="module")
def server():
    with subprocess.Popen(["sleep", "60"]) as running:
        yield running
        running.kill()

def test_that_leaves_a_process_and_fails(server):
    os.environ["LEFT"] = str(subprocess.Popen(["sleep", "61"]).pid)
    assert False

def test_that_needs_the_server_of_the_file(server):
    assert server.poll() is None
    assert os.waitpid(int(os.environ["LEFT"]), 0)[1] == 9
"""


def test_a_test_that_fails_ends_what_it_left_and_not_the_servers_of_its_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_both.py").write_text(_FILE)
    (tmp_path / "conftest.py").write_text(
        "from measuring import Measuring\n\n\n"
        "def pytest_configure(config):\n    config.pluginmanager.register(Measuring(config))\n"
    )
    run = subprocess.run(
        (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path),
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "1 failed, 1 passed" in run.stdout, run.stdout
