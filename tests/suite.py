"""Run lint beside the tests, and give failed tests a second look; what the Makefile calls.

``python tests/suite.py [--warm] ARGUMENTS OF PYTEST``. With ``--warm``, what the processes of the
tests load is prepared first. However the run ends, by a signal too, nothing that it started stays.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

import psutil

import second_look
from processes_seen import adopt_orphans

TESTS = Path(__file__).parent
RESULTS = Path("test-results")
LINT = RESULTS / "lint.log"


def end_everything() -> None:
    """SIGKILL all that this process started, servers that have left their parent included."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            process.kill()
        psutil.wait_procs(left, 5)


def stop(number: int, _: FrameType | None) -> None:
    """End as a shell command does that a signal ends."""
    sys.exit(128 + number)


def main(arguments: list[str]) -> int:
    """Exit code of the tests, or of lint where only lint found something."""
    adopt_orphans()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    RESULTS.mkdir(exist_ok=True)
    try:
        with LINT.open("wb") as log:
            make = os.environ.get("MAKE", "make")
            lint = subprocess.Popen([make, "--no-print-directory", "lint"], stdout=log, stderr=log)
            if "--warm" in arguments:
                arguments.remove("--warm")
                subprocess.run([sys.executable, str(TESTS / "warming.py")], check=True)
            outcome = second_look.run(arguments)
            found = lint.wait()
        print(LINT.read_text("utf-8") if found else "lint: nothing found")
        outcome.tell()
        return outcome.code or found
    finally:
        end_everything()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
