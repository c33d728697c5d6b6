"""What Spark's tasks do with raw records, without Spark: another process, other paths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.cloudpickle import dumps

from clean_cases import ITEM, Database, capture_of
from everstate.pipeline.clean import ParseTask
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.reading import ParsedCodec, RawReader

CHILD = """
import sys, pickle, pyarrow as pa
task, batch = pickle.loads(open(sys.argv[1], "rb").read())
assert "clean_cases" not in sys.modules
(found,) = task([batch])
open(sys.argv[2], "wb").write(pickle.dumps(found.to_pydict()))
"""


class Declared:
    """As much of a capture as a task is made of."""

    def __init__(self) -> None:
        self.reader: Any = RawReader(capture_of("debezium"), {"item": ITEM})
        self.codec = ParsedCodec()
        self.topics = {"t.raw.shop.item": "item"}


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
    headers = [[{"key": "h", "value": b"1"}], None, []]
    batch = pa.RecordBatch.from_pydict(
        {
            "topic": ["t.raw.shop.item"] * 3,
            "partition": pa.array([0, 0, 0], pa.int32()),
            "offset": [5, 6, 7],
            "key": [key for key, _ in log],
            "value": [value for _, value in log],
            "at_ms": [1_795_247_000_123] * 3,
            "headers": pa.array(
                headers, pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
            ),
        }
    )
    declared: Any = Declared()
    given, result = tmp_path / "given", tmp_path / "result"
    given.write_bytes(dumps((ParseTask.of(declared), batch)))  # type: ignore[no-untyped-call]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-c", CHILD, str(given), str(result)], check=True, env=env, cwd=tmp_path
    )
    found = pickle.loads(result.read_bytes())
    assert found["offset"] == [5, 6]
    for (key, value), parsed in zip(log, found["parsed"], strict=False):
        (row,) = declared.codec.decode(parsed)
        (here,) = declared.reader.read("item", key, value)
        assert isinstance(row, CleanRow)
        assert declared.codec.encode([row]) == declared.codec.encode([here])
