"""A request for offsets that nobody waits for any more does not end the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from everstate.log import positions
from everstate.log.topics import TopicNames, Topics
from kit.settings import altered
from running_stack import RunningStack

CHILD = Path(__file__).with_name("offsets_child.py")


def test_a_broker_that_answers_too_late_does_not_end_the_process(
    stack: RunningStack, topic_prefix: str
) -> None:
    """With the driver's own time-out (``0.002`` here) it dies of memory that is freed twice."""
    config = altered(stack.config, log={"prefix": topic_prefix})
    with Topics(config) as topics:
        topics.ensure(["order"])
    topic = TopicNames(topic_prefix).changes("order")
    ended = subprocess.run(
        [sys.executable, CHILD, topic, str(positions._NEVER_S)],
        input=config.model_dump_json(),
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0
