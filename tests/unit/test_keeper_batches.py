"""How large the keeper's batches are, and which of them are plain; no servers."""

from __future__ import annotations

import pyarrow as pa
import pytest

from everstate.pipeline.keeping.batches import BYTES, CAREFUL, FIRST, LEAST, BatchSizes
from everstate.pipeline.spark.plain_bytes import plain_bytes
from everstate.views.stores.postgres.refusals import suspects

ID = "0199c8a2-7c11-7d3e-9a55-0d8f2f6b1c77"


def test_batches_grow_while_they_are_full_and_quick() -> None:
    sizes = BatchSizes(1_000_000)
    taken = []
    for _ in range(5):
        size = sizes.next("order", careful=False)
        taken.append(size)
        sizes.took("order", size, size * 100, size / 200_000)
    assert taken == [FIRST, LEAST, 8 * LEAST, 1_000_000, 1_000_000]
    sizes.took("order", 20, 2_000, 0.3)
    assert sizes.next("order", careful=False) == LEAST, "a backlog comes step by step"


def test_a_batch_takes_ten_seconds_at_most() -> None:
    sizes = BatchSizes(1_000_000)
    for _ in range(5):
        size = sizes.next("order", careful=False)
        sizes.took("order", size, 0, size / 30_000)
    assert sizes.next("order", careful=False) == 300_000


def test_a_batch_fits_into_memory() -> None:
    """Also the first one, of records of half a megabyte each."""
    sizes = BatchSizes(1_000_000)
    assert sizes.next("order", careful=False) * 2**19 <= BYTES
    sizes.took("order", 50_000, 50_000 * 102_400, 1.0)
    assert sizes.next("order", careful=False) == BYTES // 102_400
    assert sizes.next("other", careful=False) == FIRST


def test_a_careful_batch_is_small_and_a_failed_one_begins_again() -> None:
    sizes = BatchSizes(1_000_000)
    for _ in range(5):
        sizes.took("order", sizes.next("order", careful=False), 0, 0.1)
    assert sizes.next("order", careful=False) == 1_000_000
    assert sizes.next("order", careful=True) == CAREFUL
    sizes.failed("order")
    assert sizes.next("order", careful=False) == FIRST
    assert BatchSizes(7).next("order", careful=False) == 7


def record(message: bytes | None, change_id: str | None = ID) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "raw_value": pa.array([b"{}", message], pa.binary()),
            "id": pa.array([ID, change_id], pa.string()),
        }
    )


@pytest.mark.parametrize(
    ("message", "change_id", "is_plain"),
    [
        (b'{"a":"\xc3\xbc \\\\ \\n"}', ID, True),
        (b'{"a":"\xff"}', ID, False),
        (b'{"a":"\\u0000"}', ID, False),
        (b"{}", ID.upper(), False),
        (b"{}", ID[:-1], False),
        (b"{}", f"{ID}\n", False),
        (b"{}", None, False),
        (None, ID, False),
    ],
)
def test_what_bytes_are_plain(message: bytes | None, change_id: str, is_plain: bool) -> None:
    assert plain_bytes(record(message, change_id)) == is_plain


@pytest.mark.parametrize(
    ("message", "is_suspect"),
    [
        (b'{"id":"9e100000-0000-7000-8000-000000000000"}', False),
        (b'{"a": 1e9999, "b": "\\u00fc"}', False),
        (b'{"a":1e10000}', True),
        (b'{"a":[-1.5E-20000]}', True),
        (b'{"a": 2.0e+99999}', True),
        (b'{"a":"\\ud83d\\ude00"}', True),
        (b'{"a":"\\u0000"}', True),
        (b'{"a":"' + b"x" * 140_000 + b'"}', True),
    ],
)
def test_what_jsonb_is_asked_about(message: bytes, is_suspect: bool) -> None:
    plain = b'{"id":"0e100000"}'
    for messages in ([message], [plain, message], [message, plain]):
        changes = pa.table(
            {"raw_value": pa.array(messages, pa.binary()), "offset": range(len(messages))}
        )
        expected = [messages.index(message)] if is_suspect else []
        assert suspects(changes)["offset"].to_pylist() == expected
