"""Real servers as child processes: start, stop, crash, leftovers, two projects side by side."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from everstate.config import Config, load
from everstate.errors import LocalStackError
from everstate.local import SILENT, Stack, resolve, supervise, unprivileged
from everstate.local.processes import free_port, strays

OWN_KAFKA = {"bootstrap_servers": "127.0.0.1:1"}
"""A configured address: that server is not started, which keeps a test quick."""


def postgres_only(folder: Path) -> Config:
    return load(folder, log=OWN_KAFKA)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The project whose server most tests use, one after the other."""
    folder = tmp_path_factory.mktemp("shared")
    yield folder
    Stack(postgres_only(folder)).stop()


@pytest.fixture
def postgres(folder: Path) -> Stack:
    """The server of the shared project; whatever the test before did, it runs."""
    stack = Stack(postgres_only(folder))
    stack.start()
    return stack


def ask(stack: Stack, query: str) -> object:
    with psycopg.connect(stack.resolve().store_dsn) as connection:
        row = connection.execute(query.encode()).fetchone()
        return row[0] if row else None


def test_two_projects_run_side_by_side(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with Stack(load(tmp_path / "one")) as one, Stack(load(tmp_path / "two")) as two:
        first, second = one.resolve(), two.resolve()
        assert first.bootstrap_servers != second.bootstrap_servers
        assert first.store_dsn != second.store_dsn
        assert {s.state for s in (*one.status(), *two.status())} == {"running"}
        one.stop()
        assert {s.state for s in one.status()} == {"stopped"}
        assert {s.state for s in two.status()} == {"running"}
        again = one.start()
        assert again.bootstrap_servers == first.bootstrap_servers, "ports are remembered"
        assert again.store_dsn == first.store_dsn


def test_data_outlives_a_restart_and_a_kill(postgres: Stack) -> None:
    with psycopg.connect(postgres.resolve().store_dsn) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    postgres.restart("postgres")
    assert ask(postgres, "SELECT answer FROM kept") == 42
    postgres.kill("postgres")
    postgres.start()
    assert ask(postgres, "SELECT answer FROM kept") == 42


def test_postgres_starts_over_the_lock_of_a_server_that_nobody_reaped(
    postgres: Stack, folder: Path
) -> None:
    """In a container whose first process reaps nobody, a killed server stays as a zombie."""
    postgres.stop()
    lock = postgres_only(folder).project.data_dir / "postgres/data"
    with subprocess.Popen((sys.executable, "-c", ""), stdout=subprocess.PIPE) as zombie:
        assert zombie.stdout is not None
        zombie.stdout.read()  # It has ended; until the end of this block nobody asks how.
        (lock / "postmaster.pid").write_text(f"{zombie.pid}\n{lock}\n")
        postgres.start()
        assert ask(postgres, "SELECT 42") == 42


def test_postgres_is_set_up_as_the_store_needs_it(postgres: Stack) -> None:
    settings = {
        "wal_level": "logical",
        "max_prepared_transactions": "20",
        "max_connections": "200",
        "fsync": "on",
        "TimeZone": "UTC",
        "server_encoding": "UTF8",
        "password_encryption": "scram-sha-256",
        "data_checksums": "on",
    }
    assert {name: ask(postgres, f"SHOW {name}") for name in settings} == settings


def test_postgres_asks_for_the_password_that_only_the_owner_can_read(
    postgres: Stack, folder: Path
) -> None:
    dsn = postgres.resolve().store_dsn
    wrong = dsn.replace(dsn.split(":")[2].split("@")[0], "guess")
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(wrong)
    assert (folder / ".everstate" / "postgres" / "password").stat().st_mode & 0o077 == 0
    assert (folder / ".everstate").stat().st_mode & 0o077 == 0


def test_a_crash_is_noticed_and_told_with_the_log(postgres: Stack, folder: Path) -> None:
    postgres.check()
    postgres.kill("postgres")
    assert postgres.gone() == ["postgres"]
    assert [server.state for server in postgres.status()] == ["crashed"]
    with pytest.raises(LocalStackError, match="the local postgres is gone") as caught:
        postgres.check()
    assert str(folder / ".everstate" / "logs" / "postgres.log") in str(caught.value.advice)
    assert "database system is ready" in caught.value.message
    with pytest.raises(LocalStackError, match="postgres crashed") as caught:
        postgres.resolve()
    assert "everstate up" in str(caught.value.advice)


def test_a_supervised_server_is_started_again(postgres: Stack) -> None:
    stop, told = threading.Event(), list[LocalStackError]()
    watch = threading.Thread(
        target=supervise,
        args=(postgres, stop),
        kwargs={"on_crash": told.append, "progress": SILENT},
    )
    watch.start()
    try:
        postgres.kill("postgres")
        deadline = time.monotonic() + 30
        while not (told and not postgres.gone()) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        stop.set()
        watch.join()
    assert [error.message.splitlines()[0][:30] for error in told] == [
        "the local postgres crashed. Th"
    ]
    assert ask(postgres, "SELECT 1") == 1


def test_a_server_that_does_not_start_shows_its_log(postgres: Stack, folder: Path) -> None:
    postgres.stop()
    conf = folder / ".everstate" / "postgres" / "data" / "postgresql.conf"
    right = conf.read_text()
    conf.write_text(right + "\nno_such_setting = 1\n")
    with pytest.raises(LocalStackError, match="no_such_setting"):
        postgres.start()
    assert [server.state for server in postgres.status()] == ["stopped"]
    conf.write_text(right)


def test_a_port_that_somebody_took_is_replaced(postgres: Stack) -> None:
    before = postgres.status()[0].address
    postgres.stop()
    with socket.socket() as thief:
        assert before is not None
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", int(before.partition(":")[2])))
        thief.listen()
        postgres.start()
        assert postgres.status()[0].address != before
        assert ask(postgres, "SELECT 1") == 1


def starter(folder: Path) -> subprocess.Popen[str]:
    """A program that starts the stack, says so, and would stop it in the end."""
    program = (
        "import sys, time\n"
        "from everstate.config import load\n"
        "from everstate.local import Stack\n"
        f"with Stack(load(sys.argv[1], log={OWN_KAFKA!r})):\n"
        "    print('up', flush=True)\n"
        "    time.sleep(120)\n"
    )
    return subprocess.Popen(
        (sys.executable, "-c", program, str(folder)), stdout=subprocess.PIPE, text=True
    )


@contextlib.contextmanager
def killed_run(folder: Path) -> Iterator[None]:
    """A run that was killed while its server went on."""
    with starter(folder) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "up\n"
        program.kill()
    yield


def test_the_leftover_of_a_killed_run_is_taken_over(tmp_path: Path) -> None:
    stack = Stack(postgres_only(tmp_path))
    try:
        with killed_run(tmp_path):
            left = stack.pid("postgres")
            stack.start()
            assert stack.pid("postgres") == left
            assert ask(stack, "SELECT 1") == 1
        with stack:
            pass
        assert stack.gone() == [], "what was taken over is not stopped on exit"
    finally:
        stack.stop()


def test_a_leftover_that_nobody_noted_down_is_ended(tmp_path: Path) -> None:
    stack = Stack(postgres_only(tmp_path))
    try:
        with killed_run(tmp_path):
            left = stack.pid("postgres")
            (tmp_path / ".everstate" / "stack.json").unlink()
            stack.start()
            assert stack.pid("postgres") != left
            data = tmp_path / ".everstate" / "postgres" / "data"
            found = strays(str(data), "postgres", data)
            assert [process.pid for process in found] == [stack.pid("postgres")]
    finally:
        stack.stop()


def test_a_leftover_that_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstate.local.stack._ADOPT_S_MAX", 1.0)
    monkeypatch.setattr("everstate.local.stack._STOP_S_MAX", 3.0)
    monkeypatch.setattr("everstate.local.postgres._PROBE_S", 1)
    with Stack(postgres_only(tmp_path)) as stack:
        hanging = stack.pid("postgres")
        os.kill(hanging, signal.SIGSTOP)
        assert [server.state for server in stack.status()] == ["not answering"]
        stack.start()
        assert stack.pid("postgres") != hanging
        assert ask(stack, "SELECT 1") == 1


def test_a_stack_that_was_killed_midway_through_its_first_start_starts(tmp_path: Path) -> None:
    half = tmp_path / ".everstate" / "postgres" / "data.new"
    half.mkdir(parents=True)
    (half / "half").write_text("of an initdb")
    with Stack(postgres_only(tmp_path)) as stack:
        assert ask(stack, "SELECT 1") == 1


def test_without_a_stack_the_advice_is_to_start_it(tmp_path: Path) -> None:
    with pytest.raises(LocalStackError, match="is not running") as caught:
        resolve(load(tmp_path))
    assert "everstate up" in str(caught.value.advice)
    assert Stack(load(tmp_path)).stop() == []


def test_who_has_both_servers_gets_nothing_started(tmp_path: Path) -> None:
    (tmp_path / "everstate.toml").write_text(
        '[log]\nbootstrap_servers = "kafka:9092"\n[store]\ndsn = "postgresql://db/shop"\n'
    )
    config = load(tmp_path)
    with Stack(config) as stack:
        assert stack.names == ()
        assert stack.status() == []
        assert stack.resolve() == config
        assert resolve(config) == config
    assert not (tmp_path / ".everstate").exists()


def test_the_memory_names_pid_start_and_ports(postgres: Stack, folder: Path) -> None:
    stored = json.loads((folder / ".everstate" / "stack.json").read_text())
    entry = stored["servers"]["postgres"]
    assert entry["process"]["pid"] == postgres.pid("postgres")
    assert abs(entry["process"]["started"] - time.time()) < 3600
    assert postgres.resolve().store_dsn.endswith(f"127.0.0.1:{entry['ports']['client']}/everstate")


WAYS = [False, *([True] if os.geteuid() == 0 and unprivileged.namespaces_work() else [])]
"""Whether namespaces are used to be nobody; without root there is nothing to choose."""


@pytest.mark.parametrize("namespaces", WAYS)
def test_postgres_starts_by_each_way_that_is_open_here_and_again_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespaces: bool
) -> None:
    """PostgreSQL refuses to run as root; a data folder made one way serves the other."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    for way in dict.fromkeys((namespaces, WAYS[-1])):
        monkeypatch.setattr("everstate.local.unprivileged.namespaces_work", lambda way=way: way)
        with Stack(postgres_only(closed)) as stack:
            assert ask(stack, "SELECT 1") == 1


def test_kafka_answers_again_after_a_kill_on_the_same_port(tmp_path: Path) -> None:
    own = {"dsn": f"postgresql://127.0.0.1:{free_port(set())}/none"}
    with Stack(load(tmp_path, store=own)) as stack:
        before = stack.resolve().bootstrap_servers
        stack.kill("kafka")
        assert [server.state for server in stack.status()] == ["crashed"]
        stack.start()
        assert stack.resolve().bootstrap_servers == before
        assert [server.state for server in stack.status()] == ["running"]


def test_a_copy_of_a_running_project_gets_a_server_of_its_own(tmp_path: Path) -> None:
    """Beside the record of the process, the copy has PostgreSQL's lock file with its pid."""
    (tmp_path / "one").mkdir()
    with Stack(postgres_only(tmp_path / "one")) as one:
        with psycopg.connect(one.resolve().store_dsn, autocommit=True) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
            connection.execute("CHECKPOINT")
        shutil.copytree(tmp_path / "one", tmp_path / "two")
        with Stack(postgres_only(tmp_path / "two")) as two:
            assert two.pid("postgres") != one.pid("postgres")
            with psycopg.connect(two.resolve().store_dsn) as connection:
                connection.execute("UPDATE kept SET answer = 43")
            assert (ask(one, "SELECT answer FROM kept"), ask(two, "SELECT answer FROM kept")) == (
                42,
                43,
            )
        assert [server.state for server in one.status()] == ["running"]


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_kafka_keeps_its_data_in_a_folder_whose_name_is_not_ascii(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locale: str
) -> None:
    monkeypatch.setenv("LC_ALL", locale)
    folder = tmp_path / "J\u00f6rg\\ \U0001f600"
    folder.mkdir()
    own = {"dsn": f"postgresql://127.0.0.1:{free_port(set())}/none"}
    with Stack(load(folder, store=own)) as stack:
        assert [server.state for server in stack.status()] == ["running"]
    assert (folder / ".everstate" / "kafka" / "data" / "meta.properties").exists()
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
