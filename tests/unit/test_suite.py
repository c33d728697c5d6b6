"""However a run of the suite ends, nothing that it started stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

TESTS = Path(__file__).parents[1]
STARTS_A_SERVER = """
import subprocess, sys, time
from pathlib import Path

def test_it():
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                              start_new_session=True)
    Path("server").write_text(str(server.pid))
    Path("server").rename("started")
    time.sleep(600)
"""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A suite with one test, which has started a server."""
    (tmp_path / "test_it.py").write_text(STARTS_A_SERVER)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "Makefile").write_text("lint:\n\tsleep 600\n")
    process = subprocess.Popen(
        [sys.executable, str(TESTS / "suite.py"), "-p", "second_look"],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(TESTS)},
    )
    while not (tmp_path / "started").exists():
        assert process.poll() is None
        time.sleep(0.05)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_tests_lint_and_servers(
    running: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals
) -> None:
    server = psutil.Process(int((tmp_path / "started").read_text()))
    family = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(number)
    assert running.wait(60) == 128 + number
    assert [each for each in [server, *family] if each.is_running()] == []
