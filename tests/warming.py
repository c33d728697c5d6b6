"""Class-data archives for the JVMs of the tests, written before the first worker starts.

A JVM writes its archive when it ends, and the workers' own servers end with the run: without this,
the first run on a machine would have none of them. Takes a second when they are there.
"""

from __future__ import annotations

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


if __name__ == "__main__":
    first_compiler_only()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        given = load(folder, local={"fsync": False}, pipeline={"driver_memory": "1g"})
        for each in [pool.submit(warm_servers, given), pool.submit(warm_spark, given)]:
            each.result()
