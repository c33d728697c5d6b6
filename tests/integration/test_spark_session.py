"""How Spark is started: what others on the machine can see of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

from everstate.config import Config
from everstate.log.java import java_options
from everstate.pipeline.spark.session import own_spark
from shared_spark import SessionEnded

TLS = Path(__file__).parents[1] / "tls"


def test_no_setting_of_spark_is_on_a_command_line(
    spark: SparkSession, stack_config: Config
) -> None:
    """`ps` shows command lines to everybody, and keys of S3 are settings."""
    lines = [
        " ".join(each.cmdline())
        for each in psutil.Process().children()
        if "java" in each.name() and each.status() != psutil.STATUS_ZOMBIE
    ]
    (jvm,) = [line for line in lines if "org.apache.spark" in line]
    assert "--conf" not in jvm
    assert "spark.hadoop" not in jvm
    assert f"-Xmx{stack_config.pipeline.driver_memory}" in jvm
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.sparkContext.master == stack_config.pipeline.master
    _, _, after = jvm.partition("--properties-file ")
    file = Path(after.split()[0])
    assert file.parent.name == ".everstate"
    assert not file.exists()


def test_java_reads_the_certificates_that_it_is_handed(spark: SparkSession) -> None:
    """The engine of Kafka's own client in Spark's JVM: it fails on what it cannot use."""
    given = {
        "ssl.ca.location": str(TLS / "certificate.pem"),
        "ssl.certificate.location": str(TLS / "certificate.pem"),
        "ssl.key.location": str(TLS / "key.pem"),
    }
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    secret = jvm.org.apache.kafka.common.config.types.Password
    settings = jvm.java.util.HashMap({"ssl.protocol": "TLSv1.3"})
    for name, value in java_options(given, {}).items():
        is_text = name.endswith((".type", ".algorithm"))
        settings.put(name, value if is_text else secret(value))
    factory = jvm.org.apache.kafka.common.security.ssl.DefaultSslEngineFactory()
    factory.configure(settings)
    assert factory.keystore().size() == 1
    assert factory.truststore().size() == 1


def test_a_role_that_ends_leaves_the_session_to_the_tests_after_it(
    spark: SparkSession, stack_config: Config
) -> None:
    """It lets "its" session go in a thread, at any time after it was told to end."""

    def role() -> None:
        with own_spark(stack_config):
            pass

    with ThreadPoolExecutor(1) as thread:
        thread.submit(role).result()
        with pytest.raises(SessionEnded):
            thread.submit(SparkSession.active().stop).result()
    assert spark.range(3).count() == 3


VERB = """
import sys
from pathlib import Path
from types import SimpleNamespace

from everstate.cli import main
from everstate.config import load


def drift() -> None:
    from everstate.pipeline.spark.session import own_spark, spark_errors

    with own_spark(load(Path())) as spark, spark_errors("comparing"):
        frame = spark.range(1)
        try:
            print("began", flush=True)
            spark.sparkContext._jvm.java.lang.Thread.sleep(600_000)
        finally:
            frame.unpersist()


sys.modules["everstate.cli.drift"] = SimpleNamespace(drift=drift)
main()
"""


@pytest.mark.parametrize(
    ("number", "send"), [(signal.SIGTERM, os.kill), (signal.SIGINT, os.killpg)]
)
def test_a_signal_into_a_verb_at_work_in_spark_ends_it_with_a_sentence(
    tmp_path: Path, number: signal.Signals, send: Callable[[int, int], None]
) -> None:
    """A process of its own, with its JVM: the call that is interrupted waits for the JVM.

    `kill` sends SIGTERM to one process; Ctrl-C sends SIGINT to all that a terminal has.
    """
    with subprocess.Popen(
        (sys.executable, "-c", VERB, "drift"),
        cwd=tmp_path,
        env={name: each for name, each in os.environ.items() if name != "JAVA_TOOL_OPTIONS"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as verb:
        assert verb.stdout is not None
        assert verb.stdout.readline() == "began\n"
        send(verb.pid, number)
        told = verb.communicate(timeout=60)[1]
    assert verb.returncode == 128 + number
    assert told == f"stopped by {number.name}; what was not done yet is left.\n"
