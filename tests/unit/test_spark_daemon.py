"""A Python worker whose JVM has closed the connection ends without a word."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress

import psutil


def said_by(module: str) -> str:
    """What a daemon and its worker print when the JVM closes the connection of the idle worker."""
    # The path of a Unix socket has 107 bytes at most; the folders of pytest are longer.
    with tempfile.TemporaryDirectory(prefix="everstate-") as folder:
        environment = {
            **os.environ,
            "PYTHON_UNIX_DOMAIN_ENABLED": "true",
            "PYTHON_WORKER_FACTORY_SOCK_DIR": folder,
            "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",
            "SPARK_REUSE_WORKER": "1",
        }
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [sys.executable, "-m", module, "pyspark.worker"],
            env=environment,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
        ) as started:
            assert started.stdin is not None
            assert started.stdout is not None
            assert started.stderr is not None
            with socket.socket(socket.AF_UNIX) as connection:
                length = int.from_bytes(started.stdout.read(4))
                connection.connect(started.stdout.read(length))
                worker = int.from_bytes(connection.recv(4))  # its pid: it waits for work now
            with suppress(psutil.NoSuchProcess):
                psutil.Process(worker).wait(60)
            started.stdin.close()  # so the JVM tells the daemon to end
            return started.stderr.read().decode()


def test_a_worker_whose_jvm_has_gone_ends_without_a_word() -> None:
    assert said_by("everstate.pipeline.spark.daemon") == ""


def test_the_worker_of_pyspark_prints_a_traceback() -> None:
    """When PySpark is silent itself, our daemon has nothing left to do."""
    assert "BrokenPipeError" in said_by("pyspark.daemon")


FORKED = """
import os, random, sys, uuid
from everstate.pipeline.spark import daemon
daemon.import_modules()
print(len(os.listdir("/proc/self/task")), "psycopg" in sys.modules, "pandas" in sys.modules)
for _ in range(2):
    if os.fork() == 0:
        import numpy
        from everstate.changes import new_change_id
        print(random.random(), numpy.random.random(), uuid.uuid4(), new_change_id())
        sys.exit()
    os.wait()
"""


def test_what_workers_need_is_imported_and_starts_no_thread() -> None:
    """A fork has the thread that forks alone; a lock that another one holds is held for ever."""
    command = [sys.executable, "-u", "-c", FORKED]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    imported, first, second = found.stdout.splitlines()
    assert imported.split() == ["1", "True", "True"]
    drawn = list(zip(first.split(), second.split(), strict=True))
    assert len(drawn) == 4
    assert not [pair for pair in drawn if pair[0] == pair[1]], "two workers draw the same"
