"""Following whole topics from their end, with as little delay as the broker allows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import confluent_kafka
from confluent_kafka import TopicPartition

from everstate.config import Config
from everstate.log.client import consumer_settings
from everstate.log.loop import Incoming
from everstate.log.outcome import is_transport, translate, translated
from everstate.log.positions import Offsets

_MESSAGES_MAX: Final = 5_000


class Tail:
    """New records of all partitions of some topics, read_committed; order holds in each.

    Begins at what is the end when it is made. A broker that is away is waited for.
    """

    def __init__(
        self, config: Config, topics: Iterable[str], *, client_id: str = "everstate-tail"
    ) -> None:
        with Offsets(config) as offsets:
            ends = offsets.stable_ends(list(topics))
        settings = {
            **consumer_settings(config, client_id),
            "enable.partition.eof": False,
            # A record that became stable is served at once; this bounds an empty answer.
            "fetch.wait.max.ms": 100,
        }
        self._client: Any = confluent_kafka.Consumer(settings)
        self._client.assign([TopicPartition(topic, part, at) for (topic, part), at in ends.items()])

    def close(self) -> None:
        """Give up the connection."""
        self._client.close()

    def poll(self, timeout_s: float) -> list[Incoming]:
        """What came; waits for the first record, at most so long, and not for more of them.

        Raises LogError when the broker refuses, such as a topic that was deleted.
        """
        with translated("following the log"):
            first = self._client.poll(timeout_s)
            if first is None:
                return []
            found: list[Incoming] = [first, *self._client.consume(_MESSAGES_MAX, 0)]
        if all(message.error() is None for message in found):
            return found
        for message in found:
            error = message.error()
            if error is not None and not is_transport(error):
                raise translate(error, "following the log")
        return [message for message in found if message.error() is None]
