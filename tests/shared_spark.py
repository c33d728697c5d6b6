"""The Spark session of a worker: who ends it before the run does is told, and named.

Commands, roles and scripts of pages run in a test's process, some of them in threads. They leave a
session that they did not make; one that does not would take it from all tests that are to come.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from pyspark import SparkContext
from pyspark.sql import SparkSession

_ended_by: str | None = None


class SessionEnded(Exception):
    """Something ends, or has ended, the Spark session that all tests of a worker share."""


@contextmanager
def held() -> Iterator[None]:
    """In this block a stop of Spark changes nothing and raises SessionEnded, in every thread."""
    with mock.patch.multiple(SparkSession, stop=_refused):
        with mock.patch.multiple(SparkContext, stop=_refused):
            yield


def check(test: str) -> None:
    """Raises SessionEnded when Spark's JVM is gone, with the test after which that was first seen.

    Asks the operating system, not the JVM. A process without a session has nothing to lose.
    """
    global _ended_by
    gateway = SparkContext._gateway
    code = None if gateway is None else gateway.proc.poll()
    if code is not None:
        _ended_by = _ended_by or test
        raise SessionEnded(f"Spark's JVM ended with {code} in or before {_ended_by}.")


def _refused(_: object) -> None:
    raise SessionEnded("this would end the Spark session of all tests: `own_spark` leaves it.")
