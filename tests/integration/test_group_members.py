"""Members of a group on a real broker: who owns which partitions, and who keeps them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import pytest

from everstate.config import Config
from everstate.log import members
from everstate.log.members import GroupMember
from everstate.log.topics import TopicNames, Topics
from kit.waiting import until

PARTITIONS = 3


@contextmanager
def member(config: Config, released: list[int]) -> Iterator[GroupMember]:
    def gone(partitions: Collection[int]) -> None:
        released.extend(partitions)

    topic = TopicNames(config.log.prefix).changes("order")
    with GroupMember(config, f"{config.log.prefix}.group", topic, gone) as found:
        yield found


def polled(*members: GroupMember) -> list[int]:
    """What each of them owns after a poll of all."""
    for each in members:
        each.poll(0.05)
    return sorted(len(each.owned) for each in members)


@pytest.mark.settings(log={"partitions": PARTITIONS})
def test_partitions_are_shared_and_who_works_for_long_keeps_its_own(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first read of the archive takes minutes: its process is heard of by heartbeats."""
    monkeypatch.setattr(members, "SESSION_S", 6.0)
    with Topics(config) as topics:
        topics.ensure(["order"])
    gone = list[int]()
    with member(config, gone) as one:
        until(lambda: polled(one) == [3], 60)
        with member(config, gone) as other:
            until(lambda: polled(one, other) == [1, 2], 60)
            assert one.owned | other.owned == {0, 1, 2}
            (moved,) = gone
            assert moved in other.owned
            before = one.owned
            time.sleep(members.SESSION_S + 3)
            for _ in range(40):
                assert polled(one, other) == [1, 2]
            assert (one.owned, gone) == (before, [moved])
        # It left at its end, after the work on its partitions.
        assert sorted(gone[1:]) == [moved]
        began = time.monotonic()
        until(lambda: polled(one) == [3], 60)
        assert time.monotonic() - began < members.SESSION_S
