"""What a proof reads of a kept table, and how it compares it with the expected rows."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from everstate.pipeline.proof import compare
from everstate.postgres import SharedSnapshot

TEXTS = pa.schema({"c0": pa.string(), "c1": pa.string()})
SCHEMA = pa.schema({"key": pa.string(), "n": pa.int64(), "__bucket": pa.int32()})
KEPT = compare.KeptRows(SharedSnapshot("dsn", "snapshot"), "SELECT", True)


@pytest.mark.parametrize("size", [800_000, 3_000_000])
@pytest.mark.parametrize("rows_before", range(0, 10, 3))
def test_a_row_of_any_size_is_read_wherever_it_stands(size: int, rows_before: int) -> None:
    before = [f'k{row},"{"z" * 100_000}"\n'.encode() for row in range(rows_before)]
    large = ('large,"' + '{""a"": 1}\n' * (size // 11) + '"\n').encode()
    (table,) = compare._tables([*before, large, b"last,\n"], TEXTS)
    assert table.column("c0").to_pylist()[-2:] == ["large", "last"]
    assert table.column("c1").to_pylist()[-2:] == ['{"a": 1}\n' * (size // 11), None]


def compared(
    monkeypatch: pytest.MonkeyPatch,
    expected: list[list[tuple[str, int]]],
    kept: list[tuple[str, int]],
) -> dict[str, Any]:
    """The outcome of one bucket; ``expected``: its rows, batch by batch."""
    texts = [
        pa.array([f'"{key}"' for key, _ in kept], pa.string()),
        pa.array([str(n) for _, n in kept], pa.string()),
    ]
    monkeypatch.setattr(compare.KeptRows, "read", lambda *_: iter([texts]))
    batches = [
        pa.RecordBatch.from_pylist(
            [{"key": key, "n": n, "__bucket": 0} for key, n in rows], schema=SCHEMA
        )
        for rows in expected
    ]
    (outcomes,) = compare._compare_task(batches, KEPT, 1, 1)
    outcome: dict[str, Any] = json.loads(outcomes["outcome"][0].as_py())
    return outcome


@pytest.mark.parametrize("expected", [[[("a", 1), ("a", 2)]], [[("a", 2)], [("a", 2)]]])
def test_a_key_that_the_definition_gives_twice_is_a_difference(
    monkeypatch: pytest.MonkeyPatch, expected: list[list[tuple[str, int]]]
) -> None:
    outcome = compared(monkeypatch, expected, [("a", 2)])
    assert outcome["expected_rows"] == 2
    assert outcome["different_rows"] >= 1
    assert any("a" in key for key, *_ in outcome["differences"])
    assert outcome["expected_hash"] != outcome["kept_hash"]


def test_equal_rows_have_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = compared(monkeypatch, [[("a", 1)], [("b", 2)]], [("b", 2), ("a", 1)])
    assert (outcome["expected_rows"], outcome["different_rows"]) == (2, 0)
    assert outcome["expected_hash"] == outcome["kept_hash"]
