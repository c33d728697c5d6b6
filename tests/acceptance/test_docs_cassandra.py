"""The page of Cassandra is done, on the node of this run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from everstate.log.consumer import Consumer
from everstate.log.topics import TopicNames
from page_reader import Reader
from running_stack import RunningStack

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "cassandra.md"
PATIENCE_S = 60.0


@pytest.mark.timeout(600)
def test_the_howto_of_cassandra_does_what_it_says(
    cassandra: RunningStack, reader: Reader, topic_prefix: str
) -> None:
    node = cassandra.config.cassandra
    reader.env = {
        **reader.env,
        "EVERSTATE_CASSANDRA_CONTACT_POINTS": json.dumps(node.contact_points),
        "EVERSTATE_CASSANDRA_PORT": str(node.port),
        "EVERSTATE_CASSANDRA_KEYSPACE": topic_prefix,
    }
    assert reader.follow(PAGE) == 5
    topic = TopicNames(reader.env["EVERSTATE_LOG_PREFIX"]).changes("guest")
    deadline = time.monotonic() + PATIENCE_S
    with Consumer(cassandra.config) as consumer:
        while len(list(consumer.read_topic(topic))) < 2:
            assert time.monotonic() < deadline, "the publisher published nothing"
            time.sleep(0.2)
