"""Moves the ends of a topic on without a record that anybody sees (C8).

A log that lost its newest records ends before the positions up to which it was read. What is
published next could get an offset before such a position, and that reader would never see it.
"""

from __future__ import annotations

from typing import Final

from everstate.config import Config
from everstate.log.positions import Offsets
from everstate.log.producer import Producer

_TOGETHER_MAX: Final = 100_000
"""Records of one transaction."""


def skip_offsets(config: Config, topic: str, count: int) -> None:
    """Move the end of each partition on by at least ``count`` offsets.

    The offsets are those of empty records in transactions that are aborted, which no
    ``read_committed`` reader sees. Cost: some bytes and some microseconds for each offset. Raises
    Unavailable when the broker does not answer; calling it again is harmless.
    """
    with Offsets(config) as offsets:
        partitions = sorted(partition for _, partition in offsets.beginnings([topic]))
    name = f"{config.log.prefix}.skip"
    with Producer(config, transactional_id=name, client_id=name) as producer:
        producer.init()
        for start in range(0, count, _TOGETHER_MAX):
            producer.begin()
            for _ in range(min(_TOGETHER_MAX, count - start)):
                for partition in partitions:
                    producer.send_raw(topic, None, b"", partition=partition)
            # An abort discards what was not sent yet.
            producer.flush()
            producer.abort()
