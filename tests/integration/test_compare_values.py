"""What verify takes from a message that the parser calls readable (D2)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_parse_reasons import MESSAGE, PARCEL, STATE, changed, records

from everstate.pipeline.compare import RAW, _value
from everstate.pipeline.parse import parse

LENIENT = [
    changed("provenance.actor", 5),
    changed("provenance.transaction.id", 744),
    changed("event", [1, "x"]),
    changed("more", {"currentEntityState": 1}),
    json.dumps({**MESSAGE, "key": 12, "currentEntityState": STATE}).encode(),
]


@pytest.mark.parametrize("message", LENIENT)
def test_the_state_is_found_in_every_readable_message(message: bytes) -> None:
    assert _value(RAW, message) == STATE


def test_these_messages_are_readable(spark: Any) -> None:
    source = records(spark, [(b"12" if b'"key": 12' in m else b"p1", m) for m in LENIENT])
    assert [row.reason for row in parse(source, PARCEL).collect()] == [None] * len(LENIENT)
