"""Which readers of the log are late, and which have lost something."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from everstate.attention.conditions import of_readers
from everstate.config import Config, StoreConfig
from everstate.log.lag import ReaderPosition
from everstate.log.topics import TopicNames
from everstate.serving import log_state
from everstate.serving.log_state import PartitionState, TopicState, log_readers
from everstate.views.control import BUILDING, LIVE

CONFIG = Config(store=StoreConfig(dsn="postgresql://127.0.0.1:1/none"))
TOPIC = TopicNames(CONFIG.log.prefix).changes("order", 1)


class Lag:
    """Every reader lags by one change."""

    def __init__(self, config: Config) -> None:
        del config

    def __enter__(self) -> Lag:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def rows(self, positions: Iterable[ReaderPosition]) -> list[Any]:
        return [
            SimpleNamespace(
                position=each.next_offset, partition=each.partition, lag_changes=1, lag_seconds=10.0
            )
            for each in positions
        ]


def expired(monkeypatch: pytest.MonkeyPatch, *, is_topic: bool, status: str) -> list[str]:
    """Which concerns there are when version 2 is at the log's first offset, which expired."""
    monkeypatch.setattr(log_state, "Lag", Lag)
    monkeypatch.setattr(log_state, "archive_position", lambda config, entity: {})
    rows = [(1, LIVE, 10_000_000), (2, status, 0)]
    control: Any = SimpleNamespace(
        versions=lambda: [
            SimpleNamespace(
                name="of_order", version=number, published=number == 1, status=of, is_topic=is_topic
            )
            for number, of, _ in rows
        ],
        positions=lambda: [
            SimpleNamespace(
                view="of_order",
                version=number,
                entity="order",
                generation=1,
                partition=0,
                next_offset=at,
            )
            for number, _, at in rows
        ],
    )
    partitions = (PartitionState(0, 9_000_000, 10_000_000),)
    topics = [TopicState(TOPIC, partitions, 72 * 3600, False)]
    readers = log_readers(CONFIG, control, topics, ["order"])
    return [each.key for each in of_readers(readers, CONFIG.alerts)]


def test_a_topic_that_is_built_from_the_first_change_on_has_lost_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert expired(monkeypatch, is_topic=True, status=BUILDING) == []


@pytest.mark.parametrize("status", [BUILDING, LIVE])
def test_a_view_behind_the_log_has_lost_changes(
    monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    found = expired(monkeypatch, is_topic=False, status=status)
    assert found == [f"log-expired:of_order, version 2:{TOPIC}"]
