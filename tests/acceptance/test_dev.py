"""`everstate dev` with real processes: a view that changes is rebuilt, a wrong file stops all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jsonschema_rs
import psutil
import pytest

from everstate.config import load
from everstate.log.consumer import Consumer
from everstate.log.topics import TopicNames
from kit.waiting import until
from running_stack import RunningStack

_PATIENCE_S = 400.0
"""A restart starts Spark, on a machine that may be under load."""


def wait_until(condition: Callable[[], object], what: str, about: Callable[[], str]) -> None:
    until(condition, _PATIENCE_S, 0.5, what=lambda: f"{what}\n{about()}")


@dataclass
class Project:
    """A new project whose `everstate dev` runs on the servers of the tests."""

    folder: Path
    env: dict[str, str]

    def everstate(self, *words: str) -> tuple[int, str]:
        argv = [sys.executable, "-m", "everstate.cli", "-C", str(self.folder), *words]
        done = subprocess.run(
            argv, env=self.env, capture_output=True, text=True, timeout=300, check=False
        )
        return done.returncode, done.stdout

    @property
    def log(self) -> str:
        return (self.folder / "dev.log").read_text("utf-8")

    def rows(self) -> list[dict[str, object]]:
        code, output = self.everstate("views", "show", "parcels_by_city", "--json")
        rows = [] if code else json.loads(output)
        # Sums are of any size, and so they are texts in JSON.
        numbers = [{n: v if n == "city" else int(v) for n, v in row.items()} for row in rows]
        return sorted(numbers, key=lambda row: str(row["city"]))

    def edit(self, before: str, after: str) -> None:
        path = self.folder / "parcels.py"
        text = path.read_text("utf-8")
        assert before in text
        path.write_text(text.replace(before, after), "utf-8")


@pytest.fixture
def project(stack: RunningStack, database: str, tmp_path: Path) -> Project:
    env = {
        **os.environ,
        "EVERSTATE_LOG_BOOTSTRAP_SERVERS": stack.bootstrap_servers,
        "EVERSTATE_STORE_DSN": database,
        "EVERSTATE_LOG_PREFIX": f"t{uuid.uuid4().hex[:12]}",
        "EVERSTATE_PIPELINE_MASTER": "local[2]",
        "EVERSTATE_PIPELINE_DRIVER_MEMORY": "1g",
        "EVERSTATE_METRICS_ENABLED": "false",
    }
    made = Project(tmp_path / "p", env)
    code, output = made.everstate("init", str(made.folder))
    assert code == 0, output
    return made


@pytest.fixture
def dev(project: Project) -> Iterator[psutil.Process]:
    argv = [sys.executable, "-m", "everstate.cli", "dev", "--port", "0"]
    with (project.folder / "dev.log").open("wb") as log:
        process = subprocess.Popen(
            argv, cwd=project.folder, env=project.env, stdout=log, stderr=log
        )
    found = psutil.Process(process.pid)
    try:
        yield found
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(150)
        process.kill()
        process.wait()


def parts(dev: psutil.Process) -> list[psutil.Process]:
    """`run`, `serve`, and the roles below."""
    return [each for each in dev.children(recursive=True) if is_alive(each)]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_project_is_changed_while_it_runs(project: Project, dev: psutil.Process) -> None:
    def until(condition: Callable[[], object], what: str) -> None:
        wait_until(condition, what, lambda: project.log)

    until(lambda: "serving http://127.0.0.1:" in project.log, "it serves")
    csv = str(project.folder / "parcels.csv")
    code, output = project.everstate("import", "parcel", csv)
    assert code == 0, output
    graz = {"city": "Graz", "parcels": 1, "weight_g": 200}
    wien = {"city": "Wien", "parcels": 2, "weight_g": 1200}
    until(lambda: project.rows() == [graz, wien], "the view has the imported parcels")

    # A program beside the app is not its business.
    (project.folder / "script.py").write_text("print(1)\n", "utf-8")

    # A file that is wrong: its line is shown, and nothing runs.
    before = {each.pid for each in parts(dev)}
    assert len(before) >= 3
    project.edit("app = App(", "app == App(")
    until(lambda: "nothing runs until" in project.log, "the error is shown")
    assert "error: parcels.py:9: NameError: name 'app' is not defined" in project.log
    until(lambda: not parts(dev), "all have ended")
    # A view that cannot be kept is an error, too.
    project.edit("app == App(", "app = App(")
    project.edit("sum(weight_g) AS", "median(weight_g) AS")
    until(lambda: project.log.count("nothing runs until") == 2, "the refused view is shown")
    assert "parcels.py:26: view parcels_by_city: " in project.log
    assert not parts(dev)

    # It is right again, and means something else: the view is rebuilt.
    project.edit("median(weight_g) AS", "max(weight_g) AS heaviest, sum(weight_g) AS")
    graz, wien = {**graz, "heaviest": 200}, {**wien, "heaviest": 700}
    until(lambda: project.rows() == [graz, wien], "the view is rebuilt")
    assert not before & {each.pid for each in parts(dev)}

    assert "script.py" not in project.log
    messages_fit_the_exported_schemas(project)
    below = parts(dev)
    dev.send_signal(signal.SIGINT)
    assert len(below) >= 4
    until(lambda: not any(map(is_alive, [dev, *below])), "it and all parts have ended")
    assert "stopped; `everstate down` stops the servers" in project.log


def messages_fit_the_exported_schemas(project: Project) -> None:
    """Every message of the log is valid, and a planted wrong one is not."""
    schemas = project.folder / "schemas"
    code, output = project.everstate("schema", "export", str(schemas))
    assert code == 0, output
    schema = json.loads((schemas / "parcel.change.schema.json").read_text("utf-8"))
    document = json.loads((schemas / "asyncapi.json").read_text("utf-8"))
    validator = jsonschema_rs.validator_for(schema)
    prefix = project.env["EVERSTATE_LOG_PREFIX"]
    servers = project.env["EVERSTATE_LOG_BOOTSTRAP_SERVERS"]
    config = load(project.folder, log={"bootstrap_servers": servers, "prefix": prefix})
    addresses = {each["address"] for each in document["channels"].values()}
    names = TopicNames(prefix)
    assert addresses == {names.changes("parcel"), names.state("parcel")}
    for topic in addresses:
        with Consumer(config) as consumer:
            values = [json.loads(r.value) for r in consumer.read_topic(topic) if r.value]
        assert len(values) == 3
        for value in values:
            assert [error.message for error in validator.iter_errors(value)] == []
            assert not validator.is_valid({**value, "version": "first"})
