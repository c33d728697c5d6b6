"""What the processes of the tests load, prepared before the first worker starts.

Modules: a new environment has no compiled files of them. Each worker, command and role would
compile all that it imports, a second for a command and three for a role with Spark.

Class-data archives of the JVMs: a JVM writes its archive when it ends, and the workers' own servers
end with the run. Takes a second when they are there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from everstate.config import Config, load
from everstate.local import Stack
from everstate.local.artifacts import (
    Artifact,
    artifacts_of,
    obtain,
)
from everstate.local.class_archive import class_archive_options
from everstate.local.jvm import find_jvm
from everstate.pipeline.spark.session import session_settings, spark_session
from java_settings import first_compiler_only
from kit.settings import altered

TESTS = Path(__file__).parent
CASSANDRA_JAVA = 17
WRITES = "-XX:ArchiveClassesAtExit"


def missing(config: Config, kind: str, artifacts: Sequence[Artifact]) -> bool:
    """Whether the next server of a kind would write its archive."""
    jars = [str(path) for path in obtain(config, artifacts)]
    return any(option.startswith(WRITES) for option in class_archive_options(config, kind, jars))


def warm_servers(config: Config) -> None:
    """Start and stop Kafka, Connect and, on its Java, Cassandra, where an archive is missing."""
    connect = tuple(dict.fromkeys((*artifacts_of("kafka"), *artifacts_of("connect"))))
    wanted = missing(config, "kafka", artifacts_of("kafka")) or missing(config, "connect", connect)
    if find_jvm().major == CASSANDRA_JAVA:
        wanted = wanted or missing(config, "cassandra", artifacts_of("cassandra"))
        config = altered(config, cassandra={"local": True})
    if wanted:
        Stack(config, also=("connect",)).start()
        Stack(config, also=("connect",)).stop()


def warm_spark(config: Config) -> None:
    """Start a session, use Delta, and stop it, when Spark's archive is missing."""
    if WRITES not in session_settings(config)["spark.driver.extraJavaOptions"]:
        return
    session = spark_session(config)
    path = str(Path(config.archive_path) / "warm")
    session.range(10).write.format("delta").save(path)
    assert session.read.format("delta").load(path).count() == 10
    session.stop()


def warm_modules(tests: Path) -> None:
    """Import what these tests import, and let Python keep what it compiles.

    Containers often set PYTHONDONTWRITEBYTECODE. It still holds for the tests themselves: some
    write a module twice within a second, and Python would not see that the second one is another.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    collect = (sys.executable, "-m", "pytest", "--collect-only", "-q", str(tests))
    # What cannot be imported is found by the run itself.
    subprocess.run(collect, env=environment, stdout=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    first_compiler_only()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(3) as pool:
        given = load(folder, local={"fsync": False}, pipeline={"driver_memory": "1g"})
        warming = [pool.submit(warm_modules, TESTS)]
        warming += [pool.submit(warm, given) for warm in (warm_servers, warm_spark)]
        for each in warming:
            each.result()
