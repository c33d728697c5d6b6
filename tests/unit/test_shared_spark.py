"""Nothing that runs in a test's process ends the Spark session that all tests share."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

import shared_spark


@pytest.mark.parametrize("kind", [SparkSession, SparkContext])
def test_a_stop_in_any_thread_is_an_error_with_its_place(kind: type) -> None:
    with shared_spark.held(), ThreadPoolExecutor(1) as role:
        stopping: Future[None] = role.submit(object.__new__(kind).stop)
        with pytest.raises(shared_spark.SessionEnded, match="all tests"):
            stopping.result()


def test_the_test_after_which_the_jvm_is_gone_is_named_by_all_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen((sys.executable, "-c", "input()"), stdin=subprocess.PIPE) as jvm:
        monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=jvm))
        monkeypatch.setattr(shared_spark, "_ended_by", None)
        shared_spark.check("a test")
        jvm.kill()
        jvm.wait()
        for test in ("the killer", "another"):
            with pytest.raises(shared_spark.SessionEnded, match="-9 in or before the killer"):
                shared_spark.check(test)
