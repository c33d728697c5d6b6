"""Which topics a capture is cleaned from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from clean_cases import capture_of
from everstate.errors import LogError
from everstate.log.topics import TopicNames
from everstate.sources.cdc.raw_log import Parts, parts_of

OWN = capture_of("debezium", dsn="postgresql://nobody@localhost/shop")


def parts(at: dict[str, dict[int, int]], partitions: int = 1) -> Parts:
    topics: Any = SimpleNamespace(names=TopicNames("p"), partitions=lambda _: partitions)
    nothing: Any = None
    return parts_of(OWN, topics, nothing, at)


def test_a_capture_with_dsn_is_read_from_one_topic_with_one_partition() -> None:
    one = Parts([("p.raw.shop", 0)], [""])
    assert parts({}) == parts({"": {0: 5}}) == parts({"": {0: 5}, "item": {0: 9}}) == one
    with pytest.raises(LogError, match="has 2 partitions"):
        parts({}, partitions=2)


def test_a_capture_that_was_read_from_a_topic_for_each_table_gets_no_dsn() -> None:
    with pytest.raises(LogError, match="rows between the two") as refused:
        parts({"item": {0: 9}})
    assert "everstate log begin" in str(refused.value.advice)
