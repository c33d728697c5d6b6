from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from everstate.config import Config
from everstate.errors import LogError, LogIdentityChanged
from everstate.log.topics import Topics
from everstate.sections import EntityLogConfig
from kit.settings import altered

pytestmark = pytest.mark.settings(log={"partitions": 2}, database=False)


def changed(config: Config, **fields: Any) -> Config:
    return altered(config, log=fields)


@pytest.fixture
def topics(config: Config) -> Iterator[Topics]:
    with Topics(config) as topics:
        yield topics
        names = topics.names
        entity_topics = [names.changes("order"), names.state("order"), names.dead("order")]
        topics.delete([*entity_topics, names.dead_unknown, names.progress])


def test_topics_are_made_as_configured(topics: Topics, config: Config) -> None:
    assert topics.ensure(["order"]) == ()
    changes = topics.config(topics.names.changes("order"))
    assert changes["cleanup.policy"] == "delete"
    assert changes["retention.ms"] == str(72 * 3_600_000)
    assert changes["message.timestamp.type"] == "CreateTime"
    assert int(changes["max.message.bytes"]) > config.log.message_bytes_max
    assert topics.config(topics.names.state("order"))["cleanup.policy"] == "compact"
    assert topics.config(topics.names.dead("order"))["retention.ms"] == str(720 * 3_600_000)
    assert topics.config(topics.names.progress)["cleanup.policy"] == "compact"
    assert topics.partitions(topics.names.changes("order")) == 2
    assert topics.partitions(topics.names.progress) == 1


def test_ensure_twice_changes_nothing(topics: Topics) -> None:
    topics.ensure(["order"])
    before = topics.identity(topics.names.changes("order"))
    assert topics.ensure(["order"]) == ()
    assert topics.identity(topics.names.changes("order")) == before


def test_other_settings_are_reported_not_changed(
    topics: Topics, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    topics.ensure(["order"])
    other = changed(config, partitions=3, changes_retention_hours=1)
    with Topics(other) as second, caplog.at_level(logging.WARNING, "everstate.log"):
        found = {(d.topic, d.setting): (d.wanted, d.found) for d in second.ensure(["order"])}
    name = topics.names.changes("order")
    assert found[name, "partitions"] == ("3", "2")
    assert found[name, "retention.ms"] == ("3600000", str(72 * 3_600_000))
    assert topics.partitions(name) == 2
    assert f"{name}: partitions is 2, but 3 is configured" in caplog.messages


OWN = {
    "order": EntityLogConfig(
        partitions=5, changes_retention_hours=240, changes_retention_bytes=50_000_000
    )
}


def test_an_entity_type_has_topics_of_its_own_settings(topics: Topics, config: Config) -> None:
    with Topics(changed(config, entities=OWN)) as own:
        assert own.ensure(["order", "guest"]) == ()
        assert own.ensure(["order", "guest"]) == ()
    names = topics.names
    made = topics.config(names.changes("order"))
    assert made["retention.ms"] == str(240 * 3_600_000)
    assert made["retention.bytes"] == "10000000", "a fifth of it for each partition"
    for name in (names.changes, names.state, names.dead):
        assert (topics.partitions(name("order")), topics.partitions(name("guest"))) == (5, 2)
    other = topics.config(names.changes("guest"))
    assert (other["retention.ms"], other["retention.bytes"]) == (str(72 * 3_600_000), "-1")
    beside = names.debezium("order")
    with Topics(changed(config, entities=OWN)) as own:
        own.ensure_beside(names.changes("order"), beside)
    assert topics.partitions(beside) == 5
    assert topics.config(beside)["retention.bytes"] == "10000000"
    topics.delete([beside, *(name("guest") for name in (names.changes, names.state, names.dead))])


def test_a_limit_that_is_no_longer_configured_is_named_until_it_is_lifted(
    topics: Topics, config: Config
) -> None:
    with Topics(changed(config, changes_retention_bytes=50_000_000)) as limited:
        limited.ensure(["order"])
    (left,) = topics.ensure(["order"])
    assert (left.setting, left.wanted, left.found) == ("retention.bytes", "-1", "25000000")
    assert left in topics.differences(["order"])
    topics.set_config(left.topic, {left.setting: left.wanted})
    assert topics.ensure(["order"]) == ()


def test_a_process_manager_has_a_partition_for_each_of_what_it_reads(
    topics: Topics, config: Config
) -> None:
    names = topics.names
    with Topics(changed(config, entities=OWN)) as own:
        own.ensure_commands(["order"], ["welcome"])
    made = [names.commands("order"), names.replies("order"), names.parked("order")]
    made += [names.timers("welcome"), names.seen("welcome")]
    assert [topics.partitions(name) for name in made] == [5] * 5
    topics.delete(made)


def test_retention_of_an_entity_type_is_raised_and_never_lowered_by_itself(
    topics: Topics, config: Config
) -> None:
    topics.ensure(["order"])
    name = topics.names.changes("order")
    for hours, bytes_max, found, lowered in (
        (100, -1, ("360000000", "-1"), []),
        (50, 10_000_000, ("360000000", "-1"), ["retention.ms", "retention.bytes"]),
    ):
        own = EntityLogConfig(changes_retention_hours=hours, changes_retention_bytes=bytes_max)
        with Topics(changed(config, entities={"order": own})) as other:
            planned = {each.setting: each.then for each in other.differences(["order"])}
            assert [each.setting for each in other.ensure(["order"])] == lowered
        assert planned.get("retention.ms") == (
            "stays; see `everstate doctor`" if lowered else "the next start raises it"
        )
        kept = topics.config(name)
        assert (kept["retention.ms"], kept["retention.bytes"]) == found


def test_a_raised_message_size_is_carried_out(topics: Topics, config: Config) -> None:
    topics.ensure(["order"])
    with Topics(changed(config, message_bytes_max=3_000_000)) as second:
        assert second.ensure(["order"]) == ()
    size = topics.config(topics.names.changes("order"))["max.message.bytes"]
    assert int(size) > 3_000_000
    topics.ensure(["order"])
    assert topics.config(topics.names.changes("order"))["max.message.bytes"] == size


def test_a_raised_size_is_carried_out_for_raw_topics_and_never_lowered(topics: Topics) -> None:
    raw = topics.names.raw("shop", "item")
    topics.ensure_raw([raw], partitions=1, settings={"max.message.bytes": "2000000"})
    try:
        for asked, found in ((1_000_000, "2000000"), (3_000_000, "3000000")):
            topics.raise_sizes([raw], asked)
            assert topics.config(raw)["max.message.bytes"] == found
    finally:
        topics.delete([raw])


def test_retention_can_be_raised_alone(topics: Topics) -> None:
    topics.ensure(["order"])
    name = topics.names.changes("order")
    topics.set_config(name, {"retention.ms": "999999999"})
    assert topics.config(name)["retention.ms"] == "999999999"
    assert topics.config(name)["cleanup.policy"] == "delete"


def test_c8_a_topic_made_again_under_its_name_is_another_topic(topics: Topics) -> None:
    topics.ensure(["order"])
    name = topics.names.changes("order")
    known = topics.identity(name)
    topics.check_identity({name: known})
    topics.delete([name])
    topics.ensure(["order"])
    with pytest.raises(
        LogIdentityChanged, match=r"order\.changes\.g1 is .* Nothing was read or written"
    ):
        topics.check_identity({name: known})


def test_an_unknown_topic_is_named(topics: Topics, topic_prefix: str) -> None:
    for ask in (topics.identity, topics.partitions, topics.config):
        with pytest.raises(LogError, match=f"{topic_prefix}-none"):
            ask(f"{topic_prefix}-none")
    topics.delete([f"{topic_prefix}-none"])


def test_create_refuses_a_name_that_is_taken(topics: Topics) -> None:
    topics.ensure(["order"])
    with pytest.raises(LogError, match="exists already"):
        topics.create(topics.names.changes("order"), 1, {})
