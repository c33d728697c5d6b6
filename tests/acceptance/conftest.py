"""Somebody who follows pages on the servers and the Spark session of this run."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from page_reader import Reader


@pytest.fixture
def reader(stack: Any, database: str, tmp_path: Path, spark: SparkSession) -> Iterator[Reader]:
    """A reader with an empty project folder; commands find this run's Spark, and leave it."""
    env = {
        "EVERSTATE_LOG_BOOTSTRAP_SERVERS": stack.bootstrap_servers,
        "EVERSTATE_STORE_DSN": database,
        "EVERSTATE_LOG_PREFIX": f"t{uuid.uuid4().hex[:12]}",
        "EVERSTATE_PIPELINE_MASTER": "local[2]",
        "EVERSTATE_PIPELINE_DRIVER_MEMORY": "2g",
        "PYTHONPATH": str(tmp_path),
    }
    made = Reader(tmp_path, env, real=False)
    yield made
    made.stop()
