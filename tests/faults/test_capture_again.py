"""A connector takes its first snapshot again: what was deleted meanwhile is deleted in the log.

It does so when it was stopped before it had stored a position, when it was removed with its
position and added again, and in a new epoch. No record of the raw log says what is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_capture_kill import shop, streams

from capture_cases import LOSING, PostgresSource, eventually
from clean_role import CleanRole, broken_laws, changelog
from everstate.app import App
from everstate.config import Config
from everstate.log.topics import Topics
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.cleaning import cleaning_of

pytestmark = LOSING


def without_position(capturing: Capturing, change: Callable[[], None]) -> None:
    """As after a kill before the first position was stored."""
    connector = capturing.names.connector
    capturing._connect.stop(connector)
    assert eventually(lambda: capturing.status().state == "STOPPED", 30)
    capturing._connect.forget_offsets(connector)
    change()
    capturing._connect.resume(connector)


def removed_and_added(capturing: Capturing, change: Callable[[], None]) -> None:
    capturing.remove(drop=True)
    change()
    capturing.add()


def in_a_new_epoch(capturing: Capturing, change: Callable[[], None]) -> None:
    change()
    capturing.begin_epoch()


WAYS = [without_position, removed_and_added, in_a_new_epoch]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_what_was_deleted_before_a_first_snapshot_is_taken_again_is_deleted_in_the_log(
    config: Config, database: str, spark: Any
) -> None:
    source = PostgresSource(database)
    source.run(
        *(f"CREATE TABLE {name} (id int PRIMARY KEY, note text)" for name in ("items", "lines")),
        "INSERT INTO items SELECT i, 'row ' || i FROM generate_series(1, 40) i",
        "INSERT INTO lines SELECT i, 'line ' || i FROM generate_series(1, 5) i",
    )
    app: App = shop(source.dsn)
    capturing = Capturing(config, app.capture_of("shop"), local=True)
    with Topics(config) as topics:
        topics.ensure(app.entities)
    capturing.add()
    role = CleanRole(
        lambda: Cleaner(config, cleaning_of(config, app, "shop"), session=lambda: spark), capturing
    )
    try:
        for number, way in enumerate(WAYS, 1):
            source.run(f"INSERT INTO items VALUES ({100 * number}, 'streamed')")
            assert eventually(lambda: in_log(config) == in_tables(source), 60)
            assert eventually(lambda: streams(capturing), 60)
            gone = (
                f"DELETE FROM items WHERE id % 7 = {number}",
                f"UPDATE items SET note = 'changed {number}' WHERE id % 7 = 0",
                *(["DELETE FROM lines"] if number == 2 else []),
            )
            way(capturing, lambda gone=gone: source.run(*gone))  # type: ignore[misc]
            assert eventually(lambda: in_log(config) == in_tables(source), 90, every_s=1.0), (
                way.__name__
            )
        for number, way in enumerate(WAYS, len(WAYS) + 1):
            source.run(f"INSERT INTO items VALUES ({100 * number}, 'streamed')")
            assert eventually(lambda: in_log(config) == in_tables(source), 60)
            assert eventually(lambda: streams(capturing), 60)
            # A snapshot of empty tables writes no row at all.
            way(capturing, lambda: source.run("DELETE FROM items", "DELETE FROM lines"))
            assert eventually(lambda: in_log(config) == {}, 90, every_s=1.0), way.__name__
        source.run("INSERT INTO lines VALUES (1, 'streamed')")
        assert eventually(lambda: in_log(config) == in_tables(source), 60)
    finally:
        role.end()
        capturing.remove(drop=True, topics=True)
    for entity in ("item", "line"):
        changes = changelog(config, entity)
        assert broken_laws(changes) == []
        deleted = [one for one in changes if one["kind"] == "deleted"]
        assert all(one["currentEntityState"] is None for one in deleted)
    assert len(deleted) == 5, "a table that is empty now"


def in_tables(source: PostgresSource) -> dict[tuple[str, str], str]:
    return {
        (name, str(key)): note
        for name in ("item", "line")
        for key, note in source.rows(f"SELECT id, note FROM {name}s")
    }


def in_log(config: Config) -> dict[tuple[str, str], str]:
    states = {
        (name, one["key"]): one["currentEntityState"]
        for name in ("item", "line")
        for one in changelog(config, name)
    }
    return {key: state["note"] for key, state in states.items() if state is not None}
