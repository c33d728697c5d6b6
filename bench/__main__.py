"""``python -m bench [NAMES] [--quick] [--repeat 3] [--json PATH]``, from the project's root."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from bench.report import Kept, now, table, write
from bench.session import Session
from everstate.config import load
from everstate.local import Stack

BENCHES = (
    "publish",
    "ingest",
    "archive",
    "keep",
    "riders",
    "freshness",
    "stores",
    "mirrors",
    "throttle",
    "derive",
    "rebuild",
    "lookup",
    "growth",
    "sizes",
    "kinds",
    "rest",
    "reading",
    "subscribers",
    "table",
    "commands",
    "handlers",
    "outbox",
    "clean",
    "drift",
    "cdc",
)
APART = ("peers", "lake")
"""Benches that run only when they are named."""


def main(argv: list[str] | None = None) -> int:
    """Run the named benches (all of them when none is named); 1 when a reach is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join((*BENCHES, *APART))}"
    )
    parser.add_argument("--quick", action="store_true", help="a twenty-fifth of the changes")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each figure (3)")
    parser.add_argument("--json", type=Path, help="where to write (bench/results.json)")
    chosen = parser.parse_args(argv)
    names = tuple(chosen.names) or BENCHES
    for name in names:
        if name not in (*BENCHES, *APART):
            parser.error(f"no bench {name!r}; there are {', '.join((*BENCHES, *APART))}")
    # Ended by a signal, the servers are stopped too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(stderr=True)
    results: dict[str, list[Kept]] = {}
    failed: list[str] = []
    json_path = chosen.json or (None if chosen.quick else Path("bench/results.json"))
    about = now()
    _forget_settings()
    with tempfile.TemporaryDirectory(prefix="everstate-bench-") as folder:
        # Two gigabytes are enough for every bench.
        config = load(folder, pipeline={"driver_memory": "2g"}, local={"kafka_heap_mb": 1024})
        with Stack(config) as stack:
            session = Session(stack.resolve(), chosen.repeat, chosen.quick, console, _real_files())
            session.servers = {each.name: each.pid for each in stack.status() if each.pid}
            try:
                for name in names:
                    session.say(f"[bold]{name}[/bold]")
                    try:
                        found = importlib.import_module(f"bench.{name}").run(session)
                        results[name] = [Kept(name, row, about) for row in found]
                    except Exception:
                        # An hour of other figures is not lost with one of them.
                        failed.append(name)
                        console.print_exception()
                    if json_path is not None:
                        write(results, json_path, (*BENCHES, *APART))
            finally:
                session.close()
    rows = [row for name in results for row in results[name]]
    print(table(rows))
    if failed:
        print(f"Failed, see above: {', '.join(failed)}")
    return 0 if not failed and all(row.result.holds for row in rows) else 1


def _forget_settings() -> None:
    """Settings of the user's own servers would win over those of the benches."""
    for name in [name for name in os.environ if name.startswith("EVERSTATE_")]:
        if not name.startswith("EVERSTATE_BENCH_"):
            del os.environ[name]


def _real_files() -> Path | None:
    named = os.environ.get("EVERSTATE_BENCH_DATA")
    return Path(named) if named else None


if __name__ == "__main__":
    sys.exit(main())
