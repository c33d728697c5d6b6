"""A running project with views of every kind, whose pipeline is killed while it writes a view.

Whoever kills waits until a transaction of the pipeline is on the table of the view in question:
PostgreSQL says which of its clients that is. Supervisor, servers and log live on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import psutil
import psycopg
from fault_rig import kill_family, left_after
from psycopg import sql

from everstate.changes import ChangeCodec
from everstate.config import Config, load
from everstate.local import Stack
from everstate.log.producer import Producer
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames, Topics
from everstate.views.changing import ask_rebuild
from everstate.views.control import Control
from kind_app import app
from kind_cases import sale_story, shop_story
from kinds_rig import Step, Story, change_of

HERE = Path(__file__).parent
PATIENCE_S = 240.0
STEPS = {"sale": 40, "shop": 4}
"""How many changes are sent at once."""
SENDS_A_KILL = 80
"""How often changes are sent at most until the pipeline is caught at a write and killed."""
_POLL_S = 0.2
_TOML = """
[project]
app = "kind_app:app"
[log]
partitions = 2
[archive]
trigger_s = 2
[pipeline]
master = "local[2]"
driver_memory = "1g"
"""
_BUSY = (
    "SELECT client_port FROM pg_stat_activity WHERE state <> 'idle' AND pid <> pg_backend_pid() "
    "AND query LIKE %s AND query NOT LIKE 'LOCK TABLE%%'"
)


class KindsUnderFault:
    """Servers with fsync, `everstate run` of all kinds, and what has happened to the entities."""

    def __init__(self, folder: Path, random: Random, *, kills: int) -> None:
        self.folder, self._random = folder, random
        (folder / "everstate.toml").write_text(_TOML, "utf-8")
        self.stack = Stack(load(folder))
        self.config: Config = self.stack.start()
        with Topics(self.config) as topics:
            topics.ensure(list(STEPS))
        self.told = {name: Story(name, 2) for name in STEPS}
        sends = SENDS_A_KILL * (kills + 1)
        self._next = {
            "sale": iter(sale_story(random, sends * STEPS["sale"], keys=60).steps),
            "shop": iter(shop_story(random, sends * STEPS["shop"]).steps),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start `everstate run`; it starts its pipeline again when that dies."""
        argv = [sys.executable, "-m", "everstate.cli", "--project", str(self.folder), "run"]
        path = os.pathsep.join([str(HERE.parent), str(HERE)])
        with open(self.folder / "everstate.log", "ab") as output:
            self._process = subprocess.Popen(
                argv, env={**os.environ, "PYTHONPATH": path}, stdout=output, stderr=output
            )

    def close(self) -> None:
        """End everything; nothing that was started may be left."""
        if self._process is not None:
            family = psutil.Process(self._process.pid).children(recursive=True)
            self._process.terminate()
            self._process.wait(90)
            assert left_after(family, 30) == []
        self.stack.stop()

    def send(self) -> None:
        """Some changes more of each entity type."""
        with Producer(self.config) as producer:
            for name, count in STEPS.items():
                codec = ChangeCodec(app.entity_type(name))
                topic = TopicNames(self.config.log.prefix).changes(name)
                steps = [next(self._next[name]) for _ in range(count)]
                producer.send_many(
                    OutRecord(topic, *codec.encode(_change(name, step))) for step in steps
                )
                self.told[name].steps += steps
            producer.flush(30)

    def rebuild(self, name: str) -> None:
        """Ask for a new version of a view."""
        with psycopg.connect(self.config.views_dsn, autocommit=True) as connection:
            ask_rebuild(Control(connection, self.config.views.schema_name), name)

    def kill_while_it_writes(self, name: str, *, whole: bool) -> bool:
        """Send changes until the pipeline writes a view, and kill whoever does it, at once.

        ``whole``: the driver with all that it started. Whether somebody was caught in the act.
        """
        port = self._caught(name)
        driver = self._driver()
        if port is None:
            kill_family(driver)
        elif whole:
            kill_family(driver)
        else:
            _owner(driver, port).send_signal(signal.SIGKILL)
        return port is not None

    def _caught(self, name: str) -> int | None:
        """The client port of who writes a view; ``None``: nobody did for a while.

        A lock on the view's tables makes the writer wait until it is seen; it goes on with its
        statement for a moment until it is killed.
        """
        deadline = time.monotonic() + PATIENCE_S / 4
        while time.monotonic() < deadline:
            with psycopg.connect(self.config.views_dsn) as holder:
                try:
                    self._lock(holder, name)
                except (psycopg.errors.UndefinedTable, psycopg.errors.DeadlockDetected):
                    continue  # a version was dropped
                self.send()
                port = self._writer(name, time.monotonic() + 4 * self._random.random())
            if port is not None:
                time.sleep(0.02 * self._random.random())
                return port
        return None

    def _lock(self, holder: psycopg.Connection[Any], name: str) -> None:
        """Let nobody write the tables of a view until the transaction ends."""
        schema = self.config.views.schema_name
        listed = "SELECT tablename FROM pg_tables WHERE schemaname = %s AND tablename ~ %s"
        for (table,) in holder.execute(listed, (schema, f"^{name}__v[0-9]+$")).fetchall():
            locked = sql.Identifier(schema, table)
            holder.execute(sql.SQL("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE").format(locked))

    def _writer(self, name: str, until: float) -> int | None:
        with psycopg.connect(self.config.views_dsn, autocommit=True) as connection:
            while time.monotonic() < until:
                row = connection.execute(_BUSY, (f"%{name}__v%",)).fetchone()
                if row is not None and row[0] is not None:
                    return int(row[0])
                time.sleep(0.01)
        return None

    def _driver(self) -> psutil.Process:
        """The pipeline's process that runs now."""
        assert self._process is not None

        def running() -> psutil.Process | None:
            assert self._process is not None
            for child in psutil.Process(self._process.pid).children():
                try:
                    if "pipeline" in child.cmdline():
                        return child
                except psutil.NoSuchProcess:
                    continue
            return None

        self.until("the pipeline runs", lambda: running() is not None)
        found = running()
        assert found is not None
        return found

    def settle(self) -> None:
        """Wait until every view has everything, and no version is on its way."""
        behind = (
            "SELECT count(*) FROM view v WHERE status NOT IN ('live', 'kept') OR (published "
            "AND error IS NOT NULL)"
        )
        self.until("the views are live", lambda: self.rows(behind) == [(0,)])
        wanted = {name: len(told.steps) for name, told in self.told.items()}
        reached = (
            "SELECT entity, min(total) FROM (SELECT p.entity, sum(next_offset) AS total "
            "FROM position p JOIN view v ON (v.name, v.version) = (p.view, p.version) "
            "WHERE v.status = 'live' GROUP BY p.entity, p.view, p.version) t GROUP BY entity"
        )
        self.until(
            "the views have everything",
            lambda: {name: int(at) for name, at in self.rows(reached)} == wanted,
        )
        self.until("what is joined is refreshed", self._is_refreshed)

    def _is_refreshed(self) -> bool:
        """Whether aggregates over joins have no keys left to compute."""
        query = "SELECT tablename FROM pg_tables WHERE tablename LIKE '%\\_changed'"
        left = [self.rows(f"SELECT FROM {name} LIMIT 1") for (name,) in self.rows(query)]
        return not any(left)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Rows of a query on the views' database."""
        schema = self.config.views.schema_name
        with psycopg.connect(self.config.views_dsn) as connection:
            connection.execute(f"SET search_path TO {schema}".encode())
            return connection.execute(query.encode()).fetchall()

    def until(self, what: str, done: Callable[[], bool]) -> None:
        """Wait for something; `everstate run` must live on."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                if done():
                    return
            except psycopg.errors.UndefinedTable:
                pass  # not made yet
            assert self._process is not None
            log = (self.folder / "everstate.log").read_text("utf-8", errors="replace")[-3000:]
            assert self._process.poll() is None, f"ended while waiting for {what}\n{log}"
            assert time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s: {what}\n{log}"
            time.sleep(_POLL_S)


def _change(name: str, step: Step) -> Any:
    return change_of(app.entity_type(name), 1, step)


def _owner(driver: psutil.Process, port: int) -> psutil.Process:
    """Who of a family has a connection from this port; the driver when nobody has it any more."""
    for process in driver.children(recursive=True):
        try:
            ports = {each.laddr.port for each in process.net_connections() if each.laddr}
        except psutil.Error:
            continue
        if port in ports:
            return process
    return driver
