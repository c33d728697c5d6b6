"""`everstate doctor` on real servers: each planted problem is found, and its command repairs it."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from console_cases import hotel
from everstate.attention import checks
from everstate.attention.checks import server_checks
from everstate.config import Config
from everstate.findings import Finding
from everstate.log.inspecting import Brokers, TopicFacts
from everstate.log.topics import Topics
from kit.settings import altered


@pytest.fixture
def config(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    # How full the disk of the machine is that runs the tests says nothing about its servers.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2_000_000_000))
    return altered(config, archive={"path": str(tmp_path / "archive")})


def wrong(config: Config, **options: Any) -> list[Finding]:
    """What is not in order; the tests' PostgreSQL itself runs without fsync."""
    found = server_checks(config, hotel(), probe=options.pop("probe", False), **options)
    return [
        each for each in found if each.outcome != "ok" and not each.found.startswith("fsync is off")
    ]


def test_servers_that_are_as_they_should_be_are_found_so(config: Config) -> None:
    with Topics(config) as topics:
        topics.ensure(["guest"])
    found = list(server_checks(config, hotel(), probe=True))
    assert {each.name for each in found} == {
        *("kafka", "topics", "kafka clock", "postgres", "postgres clock", "rights", "archive")
    }
    assert wrong(config, probe=True) == []
    with Topics(config) as topics:
        assert not [name for name in topics.existing() if ".doctor." in name]


def test_topics_that_differ_are_named_with_the_command_for_each(config: Config) -> None:
    with Topics(config) as topics:
        topics.ensure(["guest"])
        changes, state = topics.names.changes("guest"), topics.names.state("guest")
        planted = {"retention.ms": "1000", "max.message.bytes": "2000"}
        topics.set_config(changes, planted)
        topics.set_config(state, {"cleanup.policy": "delete"})
        found = wrong(config)
        assert topics.config(changes).items() >= planted.items(), "nothing was changed"
        assert [each.outcome for each in found] == ["warn", "warn", "fail"]
        for each in found:
            assert each.advice is not None
            words = shlex.split(each.advice)
            name, _, value = words[words.index("--add-config") + 1].partition("=")
            topics.set_config(words[words.index("--entity-name") + 1], {name: value})
    assert wrong(config) == []
    more = altered(config, log={"partitions": 9})
    partitions = wrong(more)
    assert partitions
    assert all("partitions is 4, but 9 is configured" in each.found for each in partitions)
    three = altered(config, log={"replication": 3})
    said = " ".join(each.found for each in wrong(three))
    assert "the cluster has 1 brokers" in said
    assert "fewer replicas than configured" in said
    assert "min.insync.replicas is 1, expected 2" in said


def test_a_clock_that_is_wrong_is_found_on_either_side(config: Config) -> None:
    for ahead_s, where in ((90.0, "behind"), (-90.0, "ahead of")):
        found = wrong(config, probe=True, clock=lambda ahead=ahead_s: time.time() + ahead)
        assert {each.name for each in found} == {"kafka clock", "postgres clock"}
        assert all(where in each.found for each in found)


@pytest.fixture
def restricted(config: Config, stack: Any) -> Iterator[tuple[Config, str]]:
    """The project as a role that has no rights in its database yet; and the role's name."""
    role = config.log.prefix
    with psycopg.connect(stack.dsn, autocommit=True) as connection:
        connection.execute(
            sql.SQL("CREATE ROLE {} LOGIN PASSWORD 's3cret'").format(sql.Identifier(role))
        )
    place = urlsplit(config.store_dsn)
    dsn = place._replace(netloc=f"{role}:s3cret@{place.hostname}:{place.port}").geturl()
    yield altered(config, store={"dsn": dsn}), role
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
        connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


def test_missing_rights_are_found_and_the_shown_statements_grant_them(
    config: Config, restricted: tuple[Config, str]
) -> None:
    given, _ = restricted

    def mended(expected: str) -> None:
        found = wrong(given)
        assert found
        assert expected in found[0].found
        with psycopg.connect(config.store_dsn, autocommit=True) as connection:
            for each in found:
                assert each.advice is not None
                assert "s3cret" not in each.advice
                words = shlex.split(each.advice)
                assert words[0] == "psql"
                connection.execute(words[words.index("-c") + 1].encode())
        assert wrong(given) == []

    mended("may not create")
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA everstate_views")
    mended("may not change schema everstate_views")
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        connection.execute("CREATE ROLE planted_owner")
        try:
            connection.execute("CREATE TABLE everstate_views.planted (n int)")
            connection.execute("ALTER TABLE everstate_views.planted OWNER TO planted_owner")
            mended("belong to planted_owner")
        finally:
            connection.execute("DROP OWNED BY planted_owner")
            connection.execute("DROP ROLE planted_owner")


def test_servers_that_do_not_answer_are_named(config: Config) -> None:
    found = wrong(
        altered(
            config,
            log={"bootstrap_servers": "127.0.0.1:1"},
            store={"dsn": "postgresql://u:s3cret@127.0.0.1:1/none"},
        )
    )
    assert [(each.name, each.outcome) for each in found] == [
        ("kafka", "fail"),
        ("postgres", "fail"),
    ]
    assert "s3cret" not in f"{found}"


def test_brokers_and_topics_that_no_test_server_has_are_judged(config: Config) -> None:
    assert checks.kafka_version(Brokers(3, {}, None)).outcome == "ok"
    versions = {"2.7-IV2": "fail", "2.8-IV1": "ok", "3.9-IV0": "ok", "0.11.0-IV2": "fail"}
    for protocol, outcome in versions.items():
        told = checks.kafka_version(Brokers(3, {"inter.broker.protocol.version": protocol}, None))
        assert told.outcome == outcome, protocol
    unclean = Brokers(3, {"unclean.leader.election.enable": "true"}, None)
    assert [each.outcome for each in checks.broker_settings(config, unclean)] == ["fail"]
    short = Brokers(3, {"transaction.max.timeout.ms": "5000"}, None)
    (timeout,) = checks.broker_settings(config, short)
    assert "commands need 10000" in timeout.found
    denied = [TopicFacts("t.guest.dead", 1, 1, 1, ("WRITE", "ALTER_CONFIGS"))]
    (rights,) = checks.topic_rights(config, denied)
    assert rights.advice is not None
    assert "--operation AlterConfigs --operation Write" in rights.advice
    assert list(checks.topic_rights(config, [TopicFacts("t", 1, 1, 1, ())])) == []
    (late,) = checks.replication(config, [TopicFacts("t", 3, 1, 2, ())], 3)
    assert "in sync" in late.found
