"""A project under load on servers of its own, whose parts can be killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import confluent_kafka
import psutil
import psycopg
import pytest
from deltalake.exceptions import TableNotFoundError
from fault_app import ENTITY
from fault_harness import read_log, read_ranges

from everstate.config import Config, load
from everstate.errors import Unavailable
from everstate.local import Stack
from everstate.log.positions import Offsets
from everstate.log.topics import TopicNames, Topics
from everstate.views.changing import ask_rebuild
from everstate.views.control import Control

HERE = Path(__file__).parent
WRITERS = 2
ROLES = ("relay", "pipeline")
PATIENCE_S = 300.0
_POLL_S = 0.2
_TOML = """
[project]
app = "{app}"
[log]
partitions = 3
[archive]
trigger_s = 2
[store]
relay_batch_rows = 200
[pipeline]
master = "local[2]"
driver_memory = "1g"
"""


class Rig:
    """Kafka and PostgreSQL with fsync, `everstate run` and the writers, each in its own process."""

    def __init__(self, folder: Path, app: str = "fault_app:app", more: str = "") -> None:
        self.folder = folder
        (folder / "everstate.toml").write_text(_TOML.format(app=app) + more, "utf-8")
        self.stack = Stack(load(folder))
        self.config: Config = self.stack.start()
        with Topics(self.config) as topics:
            topics.ensure([ENTITY])
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.foreign: dict[tuple[int, int], str] = {}
        self.log_names = TopicNames(self.config.log.prefix)
        self.topic = self.log_names.changes(ENTITY)
        self._environment = {**os.environ, "PYTHONPATH": str(HERE)}

    # ---- processes

    def start(self) -> None:
        """Start `everstate run`; it starts its roles, and starts again those that die."""
        everstate = [sys.executable, "-m", "everstate.cli", "--project", str(self.folder)]
        self._spawn("everstate", [*everstate, "run"])

    def roles(self) -> dict[str, psutil.Process]:
        """The processes of the roles that run now."""
        found = {}
        for child in psutil.Process(self.processes["everstate"].pid).children():
            try:
                words = child.cmdline()
            except psutil.NoSuchProcess:
                continue
            found.update({role: child for role in ROLES if role in words})
        return found

    def stop(self, name: str) -> int:
        """SIGTERM one process and wait; its exit code. Nothing that it started may be left."""
        process = self.processes.pop(name)
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        code = process.wait(90)
        assert left_after(family, 90) == []
        return code

    def start_load(self) -> None:
        """Start the writers that do not run."""
        for number in range(WRITERS):
            name = f"writer-{number}"
            if name not in self.processes:
                path = self.folder / f"{name}.acknowledged"
                script = str(HERE / "fault_app.py")
                argv = [sys.executable, script, str(self.folder), str(path)]
                self._spawn(name, [*argv, str(time.time_ns())])

    def stop_load(self) -> None:
        """Kill the writers: what they were told is in their files."""
        for number in range(WRITERS):
            self.kill(f"writer-{number}")

    def kill(self, name: str) -> None:
        """SIGKILL one process and what it started (Spark's JVM and workers)."""
        process = self.processes.pop(name, None)
        if process is not None and process.poll() is None:
            kill_family(psutil.Process(process.pid))
            process.wait()

    def close(self) -> None:
        """End everything; quick for the writers, in order for the roles."""
        self.stop_load()
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for name in list(self.processes):
            try:
                self.processes[name].wait(30)
            except subprocess.TimeoutExpired:
                self.kill(name)
        self.stack.stop()

    def _spawn(self, name: str, argv: list[str]) -> None:
        with open(self.folder / f"{name}.log", "ab") as output:
            self.processes[name] = subprocess.Popen(
                argv, env=self._environment, stdout=output, stderr=output
            )

    def told(self, name: str) -> str:
        """The end of a process's output, for a failure's message."""
        path = self.folder / f"{name}.log"
        return path.read_text("utf-8", errors="replace")[-3000:] if path.exists() else ""

    # ---- how far it is

    def kept(self, view: str | None = None) -> dict[int, int]:
        """Positions of a view, or of that which is furthest behind; empty before they are made."""
        schema = self.config.views.schema_name
        query = (
            f"SELECT partition, min(next_offset) FROM {schema}.position AS place "
            f"JOIN {schema}.view AS kept ON kept.name = place.view "
            "AND kept.version = place.version WHERE place.entity = %s AND kept.published "
            "AND place.view = coalesce(%s, place.view) GROUP BY partition"
        )
        try:
            with psycopg.connect(self.config.views_dsn) as connection:
                return dict(connection.execute(query.encode(), (ENTITY, view)).fetchall())
        except psycopg.errors.UndefinedTable:
            return {}

    def archived(self) -> dict[int, int]:
        """Where the archive's ranges end, by its commits."""
        try:
            return {partition: end for partition, _, end in read_ranges(self.config)}
        except TableNotFoundError:
            return {}

    def ends(self) -> dict[int, int]:
        """Last stable offset of each partition; waits for a broker that has just started."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with Offsets(self.config) as offsets:
                    found = offsets.stable_ends([self.topic])
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)
            else:
                return {partition: end for (_, partition), end in found.items()}

    def published_version(self, view: str) -> int:
        """The version of a view that readers see."""
        query = f"SELECT version FROM {self.config.views.schema_name}.view WHERE name = %s "
        with psycopg.connect(self.config.views_dsn) as connection:
            row = connection.execute((query + "AND published").encode(), (view,)).fetchone()
        return 0 if row is None else int(row[0])

    def ask_rebuild(self, view: str) -> int:
        """Ask for a new version, and wait until its build has begun; its number.

        Not before the archive has changes: from an empty one a version is built within two looks.
        """
        self.until("the archive has changes", lambda: any(self.archived().values()))
        schema = self.config.views.schema_name
        with psycopg.connect(self.config.views_dsn, autocommit=True) as connection:
            control = Control(connection, schema)
            asked = ask_rebuild(control, view).version
            query = (
                f"SELECT attempt IS NOT NULL OR built IS NOT NULL FROM {schema}.view "
                "WHERE name = %s AND version = %s"
            )

            def has_begun() -> bool:
                row = connection.execute(query.encode(), (view, asked)).fetchone()
                return row == (True,)

            self.until(f"version {asked} of {view} is built", has_begun)
        return asked

    def published(self) -> bool:
        """Whether the outbox has nothing left to publish."""
        query = "SELECT NOT EXISTS (SELECT FROM everstate_store.outbox_unpublished)"
        with psycopg.connect(self.config.store_dsn) as connection:
            row = connection.execute(query).fetchone()
        return row is not None and bool(row[0])

    def letters_sent(self) -> bool:
        """Whether each dead change that the keeper noted is published."""
        schema = self.config.views.schema_name
        query = f"SELECT NOT EXISTS (SELECT FROM {schema}.dead WHERE published_at IS NULL)"
        with psycopg.connect(self.config.views_dsn) as connection:
            row = connection.execute(query.encode()).fetchone()
        return row is not None and bool(row[0])

    def disturb(self) -> None:
        """Put two records into the log that no relay wrote: one again, and one unreadable."""
        log, _ = read_log(self.config)
        again = [each for each in log if (each.partition, each.offset) not in self.foreign][-1]
        producer = confluent_kafka.Producer({"bootstrap.servers": self.config.bootstrap_servers})

        def note(what: str) -> Callable[[object, confluent_kafka.Message], None]:
            def delivered(error: object, message: confluent_kafka.Message) -> None:
                assert error is None, error
                place = (message.partition() or 0, message.offset() or 0)
                self.foreign[place] = what

            return delivered

        for what, value in (("duplicate", again.value), ("unreadable", b'{"id": 7')):
            producer.produce(
                self.topic,
                key=again.key,
                value=value,
                partition=again.partition,
                on_delivery=note(what),
            )
        assert producer.flush(30) == 0

    def progress(self) -> None:
        """Wait until the views have taken something that came after now."""
        aim = sum(self.ends().values())
        self.until("the views go on", lambda: sum(self.kept().values()) > aim)

    def settle(self) -> None:
        """Stop the load, and wait until log, views and archive have everything."""
        self.stop_load()
        self.until("the outbox is published", self.published)
        ends = self.ends()
        self.until("the views are at the log's end", lambda: self.kept() == ends)
        self.until("dead letters are sent", self.letters_sent)
        self.until("the archive is at the log's end", lambda: self.archived() == ends)

    def until(self, what: str, done: Callable[[], bool]) -> None:
        """Wait for something; whatever runs goes on by itself, and nobody starts it again."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            ended = {
                name: process.returncode
                for name, process in self.processes.items()
                if process.poll() is not None
            }
            told = "\n".join(f"--- {name}: {self.told(name)}" for name in ended or self.processes)
            assert not ended, f"ended while waiting for {what}: {ended}\n{told}"
            if time.monotonic() > deadline:
                seen = f"{told}\n{self._last_lines()}\n{self._seen_in_database()}"
                pytest.fail(f"not within {PATIENCE_S:.0f} s: {what}\n{seen}")
            time.sleep(_POLL_S)

    def _last_lines(self) -> str:
        """The ends of the roles' logs, for a failure's message."""
        logs = sorted((self.folder / ".everstate" / "logs").glob("*.log"))
        return "\n".join(
            f"--- {path.name}: {path.read_text('utf-8', errors='replace')[-6000:]}"
            for path in logs
            if path.stem in ROLES
        )

    def _seen_in_database(self) -> str:
        """Versions and positions of the views, and the database's sessions, for a failure."""
        schema = self.config.views.schema_name
        queries = (
            f"SELECT to_jsonb(kept) - 'definition' FROM {schema}.view AS kept",
            f"SELECT view, version, partition, next_offset, now() - updated_at "
            f"FROM {schema}.position ORDER BY view, version, partition",
            "SELECT pid, pg_blocking_pids(pid), application_name, state, wait_event, "
            "now() - xact_start, now() - state_change, left(query, 200) FROM pg_stat_activity "
            "WHERE backend_type = 'client backend'",
        )
        with psycopg.connect(self.config.views_dsn) as connection:
            found = [connection.execute(query.encode()).fetchall() for query in queries]
        return "\n".join(str(row) for rows in found for row in rows)

    def acknowledged(self) -> Iterable[str]:
        """Lines that the writers wrote after their commits."""
        for path in sorted(self.folder.glob("*.acknowledged")):
            with open(path, encoding="utf-8") as lines:
                yield from lines


def kill_family(process: psutil.Process) -> None:
    """SIGKILL a process, then what it had started."""
    family = process.children(recursive=True)
    process.kill()
    for child in family:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue


def left_after(processes: Iterable[psutil.Process], seconds: float) -> list[str]:
    """What still runs after a while, by its command line; a zombie does not, nor a reused number.

    `psutil.wait_procs` asks by number alone, which a busy machine soon gives to somebody else.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = [told for each in processes if (told := _running(each)) is not None]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(_POLL_S)


def _running(process: psutil.Process) -> str | None:
    try:
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            return f"{process.pid} {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return None
    return None
