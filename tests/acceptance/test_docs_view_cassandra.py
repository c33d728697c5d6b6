"""The page of views in Cassandra is done, on the node of this run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from page_reader import Reader
from running_stack import RunningStack

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "views-in-cassandra.md"


@pytest.mark.timeout(600)
def test_the_howto_of_views_in_cassandra_does_what_it_says(
    cassandra: RunningStack, reader: Reader, topic_prefix: str
) -> None:
    node = cassandra.config.cassandra
    reader.env = {
        **reader.env,
        "EVERSTATE_CASSANDRA_CONTACT_POINTS": json.dumps(node.contact_points),
        "EVERSTATE_CASSANDRA_PORT": str(node.port),
        "EVERSTATE_CASSANDRA_KEYSPACE": topic_prefix,
    }
    try:
        assert reader.follow(PAGE) == 7
    finally:
        reader.stop()
