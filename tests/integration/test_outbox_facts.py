"""Facts that a service emits in its own transaction, the rights that this needs, and upgrades."""

from __future__ import annotations

import time
from typing import Any

import psycopg
import pytest
from psycopg import sql

from everstate.config import Config
from everstate.log.topics import TopicNames
from everstate.sources.outbox import Installation, Relay, install_outbox
from everstate.testing.log_checker import read_topic
from kit.settings import altered
from outbox_service import CLICK, PURCHASE, click, problems, set_total

pytestmark = pytest.mark.settings(topics=["purchase", "click"], store={"relay_poll_ms": 5})

Service = psycopg.Connection[Any]
TYPES = (PURCHASE, CLICK)
PATIENCE_S = 60.0


def drain(config: Config, relay: Relay) -> None:
    """Step until the log is what was committed."""
    found: list[str] = ["begin"]
    deadline = time.monotonic() + PATIENCE_S
    while found:
        assert time.monotonic() < deadline, found[:5]
        while relay.step():
            pass
        found = problems(config)


def test_what_is_committed_comes_whole_and_what_is_rolled_back_never(
    config: Config, service: Service
) -> None:
    with Relay(config, TYPES) as relay:
        with service.transaction():
            set_total(service, "a", 1)
            click(service, "c-1")
            set_total(service, "b", 1)
            with service.transaction():
                set_total(service, "b", 2)
                click(service, "c-2")
                raise psycopg.Rollback
        with service.transaction():
            set_total(service, "a", 2)
            click(service, "c-3")
            raise psycopg.Rollback
        drain(config, relay)
    clicks = read_topic(config, TopicNames(config.log.prefix).changes("click"))
    assert [record.key for record in clicks] == [b"c-1"]
    assert service.execute("SELECT count(*) FROM everstate_store.outbox_pending").fetchone() == (0,)


def test_the_checker_catches_a_fact_that_is_not_published(config: Config, service: Service) -> None:
    with service.transaction():
        click(service, "c-1")
    service.execute("DELETE FROM everstate_store.outbox_pending")
    with Relay(config, TYPES) as relay:
        assert relay.step() == 0
    assert problems(config) == ["click c-1: 0 in the log, 1 committed"]


def test_a_role_of_few_rights_runs_the_relay(config: Config, service: Service) -> None:
    role = f"{config.log.prefix}_relay"
    service.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'x'").format(sql.Identifier(role)))
    try:
        wanted = Installation(entity_types=[PURCHASE], relay_roles=[role])
        install_outbox(service, wanted)
        has_right = "SELECT has_table_privilege(%s, 'everstate_store.outbox', %s)"
        rights = [
            right
            for right in ("SELECT", "INSERT", "UPDATE", "DELETE")
            if service.execute(has_right, [role, right]).fetchone() == (True,)
        ]
        assert rights == ["SELECT", "DELETE"]
        dsn = f"postgresql://{role}:x@{config.store_dsn.partition('@')[2]}"
        with Relay(altered(config, store={"dsn": dsn}), TYPES) as relay:
            with service.transaction():
                set_total(service, "a", 1)
                click(service, "c-1")
            drain(config, relay)
            relay._report()
            relay.trim()
    finally:
        service.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
        service.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))
