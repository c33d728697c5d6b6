"""What verify takes from a message that the parser calls readable."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from test_parse_reasons import MESSAGE, PARCEL, STATE, changed, records

from everstate.pipeline.proof.row_texts import fragments, row_text
from everstate.pipeline.spark.parse import parse
from everstate.views.images import NEWEST, RAW

LENIENT = [
    changed("provenance.actor", 5),
    changed("provenance.transaction.id", 744),
    changed("event", [1, "x"]),
    changed("more", {"currentEntityState": 1}),
    json.dumps({**MESSAGE, "key": 12, "currentEntityState": STATE}).encode(),
]


@pytest.mark.parametrize("message", LENIENT)
def test_what_the_stores_keep_is_found_in_every_readable_message(message: bytes) -> None:
    read = json.loads(message)
    source, state = read["provenance"], read["currentEntityState"]
    assert state == STATE
    (text,) = fragments(NEWEST, pa.array([message])).to_pylist()
    assert f"[{text}]" == row_text([[source, state]])
    (text,) = fragments(RAW, pa.array([message])).to_pylist()
    assert f"[{text}]" == row_text([[source, source.get("transaction"), read.get("event"), state]])


def test_these_messages_are_readable(spark: Any) -> None:
    source = records(spark, [(b"12" if b'"key": 12' in m else b"p1", m) for m in LENIENT])
    assert [row.reason for row in parse(source, PARCEL).collect()] == [None] * len(LENIENT)
