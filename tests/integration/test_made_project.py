"""The tests of a project that `everstate init` made hold, and see a view that counts wrongly.

They start a Spark session of their own in a child process, as they do where a user runs them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from everstate.cli import cli


def run_tests(folder: Path) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_the_tests_of_a_made_project_hold_and_see_a_wrong_view(tmp_path: Path) -> None:
    folder = tmp_path / "parcels"
    done = CliRunner().invoke(cli, ["init", str(folder)])
    assert done.exit_code == 0, done.output
    tested = run_tests(folder)
    assert tested.returncode == 0, tested.stdout
    assert "4 passed" in tested.stdout
    module = folder / "parcels.py"
    module.write_text(module.read_text("utf-8").replace("sum(weight_g)", "max(weight_g)"), "utf-8")
    tested = run_tests(folder)
    assert tested.returncode == 1
    assert "2 failed, 2 passed" in tested.stdout
