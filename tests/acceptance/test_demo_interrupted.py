"""The demonstration, interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kit.waiting import until
from processes_seen import named

DEMO = [sys.executable, "-m", "everstate.cli", "demo"]

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_ctrl_c_stops_everything_that_was_started(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole group in its foreground: to children too."""
    said = tmp_path / "said.txt"
    with said.open("wb") as output:
        process = subprocess.Popen(
            DEMO,
            cwd=tmp_path,
            stdout=output,
            stderr=output,
            start_new_session=True,
            # A suite that was started with `nohup` or `&` ignores SIGINT, and would pass that on.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    started: set[psutil.Process] = set()

    def flights_are_played() -> bool:
        started.update(psutil.Process(process.pid).children(recursive=True))
        assert process.poll() is None, said.read_text()
        return re.search(r"store [\d,]+, log", said.read_text()) is not None

    until(flights_are_played)
    assert named(started, "java") != []
    os.killpg(process.pid, signal.SIGINT)
    code = process.wait(120)
    assert code != 0, said.read_text()
    assert "Traceback" not in said.read_text()
    _, left = psutil.wait_procs(list(started), timeout=10)
    assert left == []
