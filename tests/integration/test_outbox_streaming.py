"""The relay that reads the WAL: once, in order, whole (C1-C4), and the slot behind it (C10)."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from prometheus_client import REGISTRY
from psycopg import sql

from everstate.config import Config
from everstate.errors import Fenced, ReplicationUnavailable, SlotLost, Unavailable
from everstate.log.publisher import OncePublisher
from everstate.log.topics import TopicNames, Topics
from everstate.sources.outbox import (
    Installation,
    Relay,
    StreamingRelay,
    drop_slot,
    install_outbox,
    marks,
    read_slot,
    read_status,
    relay_of,
)
from everstate.sources.outbox.replication import ReplicationStream
from everstate.testing.log_checker import read_topic
from outbox_service import (
    CLICK,
    PURCHASE,
    click,
    make_service,
    problems,
    remove,
    set_total,
    transact,
)

Service = psycopg.Connection[Any]
TYPES = (PURCHASE, CLICK)
PATIENCE_S = 60.0


@pytest.fixture
def config(stack: Any, database: str, topic_prefix: str) -> Config:
    running: Config = stack.config
    store = {"dsn": database, "relay": "replication", "relay_poll_ms": 5}
    config = running.model_copy(
        update={
            "store": running.store.model_copy(update=store),
            "log": running.log.model_copy(update={"prefix": topic_prefix}),
        }
    )
    with Topics(config) as topics:
        topics.ensure(each.name for each in TYPES)
    make_service(database)
    return config


@pytest.fixture
def service(config: Config) -> Iterator[Service]:
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        yield connection


def until(holds: Callable[[], bool], relay: Relay) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        relay.step()


def streaming(relay: StreamingRelay) -> bool:
    """Whether it has looked for what a slot that was begun or taken up might have missed."""
    is_past = relay._snapshot is None or relay._sweep_at > relay._check_until
    return relay._stream is not None and not relay._polls and is_past


def drain(config: Config, relay: Relay, **more: Any) -> None:
    """Step until the log is what was committed."""
    found: list[str] = ["begin"]
    deadline = time.monotonic() + PATIENCE_S
    while found:
        assert time.monotonic() < deadline, found[:5]
        while relay.step():
            pass
        found = problems(config, **more)


def write(service: Service, *keys: str, total: int = 1) -> None:
    with service.transaction():
        for key in keys:
            set_total(service, key, total)


def pending(service: Service) -> int:
    row = service.execute("SELECT count(*) FROM everstate_store.outbox_pending").fetchone()
    assert row is not None
    return int(row[0])


def held_mib(service: Service) -> float:
    return read_slot(service).held_bytes / 2**20


def test_what_is_committed_comes_whole_and_what_is_rolled_back_never(
    config: Config, service: Service
) -> None:
    with StreamingRelay(config, TYPES) as relay:
        until(lambda: streaming(relay), relay)
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
        write(service, "a", total=3)
        drain(config, relay)
        clicks = read_topic(config, TopicNames(config.log.prefix).changes("click"))
        assert [record.key for record in clicks] == [b"c-1"]
        assert pending(service) == 0


def test_a_transaction_too_large_for_one_kafka_transaction_is_polled_in_parts(
    config: Config, service: Service
) -> None:
    limits = {"relay_batch_rows": 10, "relay_transaction_rows": 25}
    few = config.model_copy(update={"store": config.store.model_copy(update=limits)})
    with StreamingRelay(few, TYPES) as relay:
        until(lambda: streaming(relay), relay)
        with service.transaction():
            write(service, *(f"k{number}" for number in range(60)))
            click(service, "c-1")
        moved = list[int]()
        while pending(service):
            moved.append(relay.step())
        assert 0 < max(moved) <= 12
        until(lambda: streaming(relay), relay)
        write(service, "k2", total=2)
        drain(config, relay)


def test_C1_writers_that_interleave_come_out_in_version_order(
    config: Config, service: Service
) -> None:
    stop = threading.Event()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        with psycopg.connect(config.store_dsn, autocommit=True) as own:
            for _ in range(60):
                transact(own, rng, clicks=True)

    with StreamingRelay(config, TYPES) as relay:
        until(lambda: streaming(relay), relay)
        running = threading.Thread(target=relay.run, args=[stop])
        running.start()
        writers = [threading.Thread(target=work, args=[seed]) for seed in range(4)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        stop.set()
        running.join(10)
        assert not running.is_alive()
        drain(config, relay)


def test_what_was_pending_before_the_slot_goes_out_first(config: Config, service: Service) -> None:
    for total in range(1, 4):
        write(service, "a", "b", total=total)
    with StreamingRelay(config, TYPES) as relay:
        relay.step()
        write(service, "a", total=9)
        drain(config, relay)
        until(lambda: streaming(relay), relay)


def test_a_slot_that_waits_for_an_open_transaction_is_no_reason_to_wait(
    config: Config, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstate.sources.outbox.slot._CREATE_MS", 200)
    monkeypatch.setattr("everstate.sources.outbox.streaming._SLOT_AGAIN_S", 0.5)
    with psycopg.connect(config.store_dsn) as other, StreamingRelay(config, TYPES) as relay:
        set_total(other, "open", 1)
        write(service, "a")
        drain(config, relay)
        assert read_slot(service).state == "none"
        other.commit()
        until(lambda: streaming(relay), relay)
        write(service, "a", total=2)
        drain(config, relay)


def test_C3_a_restart_goes_on_behind_what_the_log_has(config: Config, service: Service) -> None:
    for turn in range(3):
        with StreamingRelay(config, TYPES) as relay:
            until(lambda at=relay: streaming(at), relay)  # type: ignore[misc]
            write(service, "a", "b", total=turn + 1)
            with service.transaction():
                click(service, f"c-{turn}")
            drain(config, relay)


def test_C3_a_batch_that_was_published_and_not_marked_is_not_sent_again(
    config: Config, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> int:
        raise psycopg.OperationalError("the server is gone")

    with StreamingRelay(config, TYPES) as killed:
        until(lambda: streaming(killed), killed)
        with monkeypatch.context() as patch:
            patch.setattr(marks, "mark", lost)
            with service.transaction():
                set_total(service, "a", 1)
                click(service, "c-1")
            with pytest.raises(Unavailable):
                until(lambda: False, killed)
        write(service, "a", total=2)
    with StreamingRelay(config, TYPES) as relay:
        drain(config, relay)
    assert pending(service) == 0


def test_C10_the_checker_catches_a_slot_confirmed_before_kafka_acknowledged(
    config: Config, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted defect: what was taken is confirmed at once; then the relay dies."""
    take = StreamingRelay._take

    def hasty(self: StreamingRelay, wait_s: float) -> Any:
        streamed, read_to = take(self, wait_s)
        assert self._stream is not None
        if streamed:
            self._stream.confirm(streamed[-1].end_lsn)
            deadline = time.monotonic() + 5
            while not is_confirmed(service, streamed[-1].end_lsn):
                assert time.monotonic() < deadline
        return streamed, read_to

    def die(*_: object, **__: object) -> bool:
        raise Unavailable("killed")

    def killed_relay() -> None:
        with StreamingRelay(config, TYPES) as relay:
            until(lambda: streaming(relay), relay)
            with service.transaction():
                click(service, f"c-{random.random()}")
            with monkeypatch.context() as patch:
                patch.setattr(OncePublisher, "publish", die)
                with pytest.raises(Unavailable):
                    until(lambda: False, relay)

    killed_relay()
    with StreamingRelay(config, TYPES) as relay:
        drain(config, relay)
    with monkeypatch.context() as patch:
        patch.setattr(StreamingRelay, "_take", hasty)
        killed_relay()
    with StreamingRelay(config, TYPES) as relay:
        until(lambda: streaming(relay), relay)
        write(service, "last")
        drain_rows(config, relay)
    assert [each.partition(":")[2] for each in problems(config)] == [" 0 in the log, 1 committed"]


def is_confirmed(service: Service, lsn: int) -> bool:
    row = service.execute(
        "SELECT confirmed_flush_lsn - '0/0' >= %s FROM pg_replication_slots"
        " WHERE database = current_database()",
        [lsn],
    ).fetchone()
    return row is not None and bool(row[0])


def drain_rows(config: Config, relay: Relay) -> None:
    until(lambda: not [each for each in problems(config) if each.startswith("purchase")], relay)


def test_a_row_that_a_slot_did_not_bring_is_found_and_polled(
    config: Config, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with StreamingRelay(config, TYPES) as relay:
        until(lambda: streaming(relay), relay)
    write(service, "a")
    slot = read_slot(service).slot
    service.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", [slot])
    with caplog.at_level(logging.INFO), StreamingRelay(config, TYPES) as relay:
        drain(config, relay)
        until(lambda: streaming(relay), relay)
    assert "the slot did not bring" in caplog.text


def test_C3_a_log_that_lost_its_tail_is_refilled_while_the_relay_streams(
    config: Config, service: Service
) -> None:
    names = TopicNames(config.log.prefix)
    with StreamingRelay(config, TYPES) as relay:
        until(lambda: streaming(relay), relay)
        for total in range(3):
            write(service, "a", "b", total=total)
        drain(config, relay)
        with Topics(config) as topics:
            topics.delete([names.changes("purchase"), names.state("purchase")])
            deadline = time.monotonic() + PATIENCE_S
            while True:
                with suppress(Unavailable):
                    topics.ensure(each.name for each in TYPES)
                    break
                assert time.monotonic() < deadline
        assert relay.refill(datetime.now(UTC) - timedelta(hours=1)) == 6
        drain(config, relay)
        until(lambda: streaming(relay), relay)


def test_C3_a_second_relay_takes_over_and_the_first_is_fenced(
    config: Config, service: Service
) -> None:
    with StreamingRelay(config, TYPES) as first, StreamingRelay(config, TYPES) as second:
        until(lambda: streaming(first), first)
        write(service, "a")
        drain(config, first)
        until(lambda: streaming(second), second)
        write(service, "a", total=2)
        with pytest.raises(Fenced):
            step_on(first)
        drain(config, second)


def step_on(relay: Relay) -> None:
    """As `run` does: what is away now may be back at the next step."""
    for _ in range(20):
        with suppress(Unavailable):
            relay.step()


def test_C4_what_the_log_refuses_blocks_only_itself_and_facts_go_on(
    config: Config, service: Service
) -> None:
    topic = TopicNames(config.log.prefix).changes("purchase")
    with Topics(config) as topics, StreamingRelay(config, TYPES, retry_blocked_s=0.05) as relay:
        until(lambda: streaming(relay), relay)
        limit = topics.config(topic)["max.message.bytes"]
        topics.set_config(topic, {"max.message.bytes": "20000"})
        write(service, "big", "free")
        drain(config, relay)
        with service.transaction():
            set_note(service, "big", random.randbytes(40_000).hex())
            click(service, "c-with-big")
        write(service, "big", "mate", total=3)
        write(service, "free", total=2)
        with service.transaction():
            click(service, "c-free")
        until(lambda: len(read_status(service).blocked) == 1, relay)
        until(lambda: keys_of(config, "click") == {"c-free"}, relay)
        assert problems(config, complete=False) == []
        topics.set_config(topic, {"max.message.bytes": limit})
        drain(config, relay)
        assert read_status(service).blocked == ()
        until(lambda: streaming(relay), relay)
        write(service, "big", total=4)
        drain(config, relay)


def set_note(service: Service, key: str, note: str) -> None:
    from everstate.sources.outbox import emit
    from outbox_service import SHOP, read

    before = read(service, key)
    assert before is not None
    service.execute("UPDATE purchase SET note = %s WHERE id = %s", [note, key])
    after = before.model_copy(update={"note": note})
    emit(service, PURCHASE, before=before, after=after, provenance=SHOP)


def keys_of(config: Config, entity: str) -> set[str]:
    records = read_topic(config, TopicNames(config.log.prefix).changes(entity))
    return {(record.key or b"").decode() for record in records}


def test_a_message_that_is_no_fact_is_kept_and_stops_nothing(
    config: Config, service: Service
) -> None:
    with StreamingRelay(config, TYPES) as relay:
        until(lambda: streaming(relay), relay)
        service.execute("SELECT pg_logical_emit_message(true, 'everstate', 'nonsense')")
        service.execute("SELECT pg_logical_emit_message(true, 'another', 'theirs')")
        write(service, "a")
        drain(config, relay)
    kept = service.execute("SELECT content FROM everstate_store.relay_refused").fetchall()
    assert kept == [(b"nonsense",)]


def test_relays_of_both_kinds_follow_each_other(config: Config, service: Service) -> None:
    polling = config.model_copy(
        update={"store": config.store.model_copy(update={"relay": "polling"})}
    )
    assert type(relay_of(polling, TYPES)) is Relay
    for turn, each in enumerate((config, polling, config, polling, config)):
        write(service, "a", "b", total=2 * turn + 1)
        with relay_of(each, TYPES) as relay:
            drain(each, relay)
            write(service, "b", total=2 * turn + 2)
            drain(each, relay)


def lose(service: Service) -> None:
    """Make the server forget WAL that the slot needs, as a full disk's guard does."""
    service.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'")
    service.execute("SELECT pg_reload_conf()")
    try:
        deadline = time.monotonic() + PATIENCE_S
        while read_slot(service).state != "lost":
            assert time.monotonic() < deadline
            service.execute("SELECT pg_logical_emit_message(false, 'filler', 'x')")
            service.execute("SELECT pg_switch_wal()")
            service.execute("CHECKPOINT")
    finally:
        service.execute("ALTER SYSTEM RESET max_slot_wal_keep_size")
        service.execute("SELECT pg_reload_conf()")


@pytest.mark.parametrize("how", ["lost", "dropped"])
def test_a_lost_slot_stops_the_relay_or_is_refilled_as_was_chosen(
    config: Config, service: Service, how: str
) -> None:
    with StreamingRelay(config, TYPES) as relay:
        until(lambda: streaming(relay), relay)
        write(service, "a", "b")
        drain(config, relay)
    write(service, "a", total=2)
    with service.transaction():
        set_total(service, "b", 2)
        click(service, "c-gone")
    if how == "lost":
        lose(service)
    else:
        slot = read_slot(service).slot
        service.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    with StreamingRelay(config, TYPES) as relay, pytest.raises(SlotLost, match=how):
        relay.run(threading.Event())
    assert problems(config, complete=False) == []
    refill = config.model_copy(
        update={"store": config.store.model_copy(update={"slot_lost": "refill"})}
    )
    with StreamingRelay(refill, TYPES) as relay:
        until(lambda: streaming(relay), relay)
        write(service, "a", total=3)
        drain_rows(config, relay)
    # What stood in the WAL only is gone, as is said; nothing else.
    assert problems(config, whole=False) == ["click c-gone: 0 in the log, 1 committed"]


def test_wal_of_other_databases_is_not_held_while_this_one_is_idle(
    config: Config, service: Service, stack: Any
) -> None:
    stop = threading.Event()
    with (
        StreamingRelay(config, TYPES) as relay,
        psycopg.connect(stack.dsn, autocommit=True) as other,
    ):
        until(lambda: streaming(relay), relay)

        def fill() -> None:
            for _ in range(3):
                other.execute("SELECT pg_logical_emit_message(false, 'filler', repeat('x', 9000))")
                other.execute("SELECT pg_switch_wal()")
            other.execute("CHECKPOINT")

        relay.close()
        fill()
        without = held_mib(service)
        running = threading.Thread(target=relay.run, args=[stop])
        running.start()
        deadline = time.monotonic() + PATIENCE_S
        while held_mib(service) > 1:
            assert time.monotonic() < deadline
            fill()
            time.sleep(1.1)
        stop.set()
        running.join(10)
    assert without > 20


def test_the_held_wal_is_measured_and_alarmed(
    config: Config, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    low = config.model_copy(update={"store": config.store.model_copy(update={"slot_alarm_mib": 1})})
    with StreamingRelay(low, TYPES) as relay:
        until(lambda: streaming(relay), relay)
        with caplog.at_level(logging.WARNING):
            relay._report()
        assert "of WAL for slot" not in caplog.text
        service.execute("SELECT pg_logical_emit_message(false, 'filler', repeat('x', 3000000))")
        with caplog.at_level(logging.WARNING):
            relay._report()
            relay._report()
        assert caplog.text.count("of WAL for slot") == 1
        held = REGISTRY.get_sample_value("everstate_outbox_slot_held_bytes")
        assert held is not None
        assert held > 2**20
        assert REGISTRY.get_sample_value("everstate_outbox_slot_safe_bytes") == -1


def test_a_dropped_slot_holds_nothing_and_a_relay_makes_it_again(
    config: Config, service: Service
) -> None:
    with StreamingRelay(config, TYPES) as relay:
        until(lambda: streaming(relay), relay)
    assert drop_slot(service)
    assert not drop_slot(service)
    assert read_slot(service).state == "none"
    write(service, "a")
    with StreamingRelay(config, TYPES) as relay:
        drain(config, relay)
        until(lambda: streaming(relay), relay)


def test_a_commit_that_is_in_the_wal_before_it_is_visible_is_waited_for(
    config: Config, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a synchronous standby makes long: the mark finds nothing to take off at first."""
    mark, blind = marks.mark, [3]

    def early(connection: Any, name: str, batch: int, runs: Any) -> int:
        if blind[0] and runs:
            blind[0] -= 1
            return 0
        return mark(connection, name, batch, runs)

    with StreamingRelay(config, TYPES) as relay:
        until(lambda: streaming(relay), relay)
        monkeypatch.setattr(marks, "mark", early)
        write(service, "a")
        drain(config, relay)
    assert blind == [0]
    assert pending(service) == 0


def test_a_role_of_few_rights_runs_the_relay(config: Config, service: Service) -> None:
    role = f"{config.log.prefix}_relay"
    service.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'x'").format(sql.Identifier(role)))
    try:
        wanted = Installation(entity_types=[PURCHASE], relay_roles=[role])
        install_outbox(service, wanted)
        dsn = f"postgresql://{role}:x@{config.store_dsn.partition('@')[2]}"
        store = config.store.model_copy(update={"dsn": dsn})
        lean = config.model_copy(update={"store": store})
        with StreamingRelay(lean, TYPES) as relay:
            until(lambda: streaming(relay), relay)
            with service.transaction():
                set_total(service, "a", 1)
                click(service, "c-1")
            drain(config, relay)
            relay._report()
            relay.trim()
        write(service, "a", total=2)
        polling = lean.model_copy(update={"store": store.model_copy(update={"relay": "polling"})})
        with relay_of(polling, TYPES) as relay:
            drain(config, relay)
        with StreamingRelay(lean, TYPES) as relay:
            service.execute(sql.SQL("ALTER ROLE {} NOREPLICATION").format(sql.Identifier(role)))
            drop_slot(service)
            with pytest.raises(ReplicationUnavailable, match="REPLICATION"):
                relay.step()
    finally:
        service.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
        service.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


def test_a_stream_that_is_cut_is_taken_up_again(config: Config, service: Service) -> None:
    with StreamingRelay(config, TYPES) as relay:
        until(lambda: streaming(relay), relay)
        assert isinstance(relay._stream, ReplicationStream)
        service.execute("SELECT pg_terminate_backend(%s)", [relay._stream.pid])
        write(service, "a")
        with pytest.raises(Unavailable):
            until(lambda: False, relay)
        with service.transaction():
            remove(service, "a")
            click(service, "c-1")
        drain(config, relay)
