"""Why Spark failed, in one line for the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa
import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.sql import SparkSession

from everstate.errors import (
    EverstateError,
    HeldOverflow,
    PipelineError,
    SparkLost,
    Unavailable,
)
from everstate.pipeline.spark.session import spark_errors, translate

PYTHON = """Job aborted due to stage failure: Task 0 in stage 3.0 failed 1 times, most recent:
Lost task 0.0 in stage 3.0 (TID 5) (host executor driver): org.apache.spark.api.python.\
PythonException: Traceback (most recent call last):
  File "/x/worker.py", line 9, in process
    out_iter = func(split_index, iterator)
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/x/task.py", line 70, in _apply
    raise ViewStoreError("ordr_latest cannot be written")
everstate.errors.ViewStoreError: ordr_latest cannot be written: disk quota
and more of it

\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:1)
Caused by: java.io.EOFException
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (PYTHON, "ViewStoreError: ordr_latest cannot be written: disk quota"),
        ("first\n\tat x.y.Z\nCaused by: java.io.IOException: no\n\tat a.b", "IOException: no"),
        ("\n[DIVIDE_BY_ZERO] Division by zero.\nmore", "[DIVIDE_BY_ZERO] Division by zero."),
        ("", "Spark gave no reason"),
    ],
)
def test_the_reason_is_the_line_that_says_why(text: str, reason: str) -> None:
    assert str(translate(ValueError(text), "keeping views")) == f"keeping views: {reason}"


def test_a_dead_jvm_is_told_apart() -> None:
    assert isinstance(translate(Py4JNetworkError("gone"), "x"), SparkLost)
    assert not SparkLost.retryable


@pytest.mark.parametrize(
    ("raised", "told", "wanted"),
    [
        (
            lambda: HeldOverflow("ordr", 5, 2),
            PipelineError,
            r"^keeping views: HeldOverflow: ordr: 5 changes wait .* or raise the limit\.$",
        ),
        (
            lambda: Unavailable("no database"),
            Unavailable,
            r"does not answer \(Unavailable: no database\)",
        ),
    ],
)
def test_what_a_task_raises_reaches_the_user(
    spark: SparkSession,
    raised: Callable[[], EverstateError],
    told: type[EverstateError],
    wanted: str,
) -> None:
    def fails(_: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        raise raised()

    with pytest.raises(told, match=wanted), spark_errors("keeping views"):
        spark.range(3).mapInArrow(fails, "id long").collect()
