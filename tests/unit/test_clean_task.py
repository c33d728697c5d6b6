"""What Spark's tasks do with raw records, without Spark: another process, other paths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
from pyspark.cloudpickle import dumps

from clean_cases import ITEM, Database, capture_of
from everstate.pipeline.clean import SliceTask
from everstate.sources.cdc.columns import Rows, Slices
from everstate.sources.cdc.reading import RawReader

CHILD = """
import sys, pickle
task, batch = pickle.loads(open(sys.argv[1], "rb").read())
assert "clean_cases" not in sys.modules
(found,) = task([batch])
open(sys.argv[2], "wb").write(pickle.dumps(found))
"""


def test_a_task_in_another_process_finds_the_project_and_reads_as_the_driver_does(
    tmp_path: Path,
) -> None:
    import pickle

    database = Database("debezium, default")
    database.write(1, {"name": "a", "note": "long"})
    database.write(1, {"name": "b"})
    database.log.append(({"id": 1}, None))
    log = [
        (json.dumps(k).encode(), None if v is None else json.dumps(v).encode())
        for k, v in database.log
    ]
    slices = Slices(RawReader(capture_of("debezium"), {"item": ITEM}), ["item"], {"public.item": 0})
    none = pa.nulls(3, pa.binary())
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array(["t.raw.shop.item"] * 3),
            pa.array([2, 2, 2], pa.int32()),
            pa.array([5, 6, 7]),
            pa.array([1_795_247_000_123] * 3),
            pa.array([key for key, _ in log], pa.binary()),
            pa.array([value for _, value in log], pa.binary()),
            none,
            none,
        ],
        names=["topic", "partition", "offset", "at_ms", "key", "value", "h0", "h1"],
    )
    given, result = tmp_path / "given", tmp_path / "result"
    task = SliceTask.of(slices, [("t.raw.shop.item", 2)])
    given.write_bytes(dumps((task, batch)))  # type: ignore[no-untyped-call]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-c", CHILD, str(given), str(result)], check=True, env=env, cwd=tmp_path
    )
    found = pickle.loads(result.read_bytes())
    here = slices.begin().columns(
        (0, offset, key, value, (None, None), 0) for offset, (key, value) in enumerate(log, 5)
    )
    assert found == here
    rows = Rows.of(found)
    assert (rows.offset, rows.key) == ([5, 6], ["1", "1"])
    assert (rows.state[0] is None, rows.rest[1] is None) == (False, False)
