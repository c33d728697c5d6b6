"""Raw rows that were deleted before they were cleaned: no state is made of what was before them."""

from __future__ import annotations

import json

import pytest

from clean_cases import Cleaner, Database, broken_laws, capture_of
from everstate.sources.cdc.completion import PRIOR_UNKNOWN
from everstate.sources.cdc.holding import LOST, doubt_all


def resumed(cleaner: Cleaner) -> set[tuple[str, str]]:
    """As cleaning goes on behind a gap, with ``on_loss="resume"``."""
    capture = cleaner.reader.capture
    return doubt_all(cleaner.held, cleaner.copy, capture, capture.tables, 0.0)


@pytest.mark.parametrize("keys", [(1,), (1, 2, 3)])
@pytest.mark.parametrize("is_trusted", [False, True])
def test_a_partial_row_behind_a_gap_waits_for_a_snapshot(
    keys: tuple[int, ...], is_trusted: bool
) -> None:
    database = Database("debezium, default")
    for key in keys:
        database.write(key, {"name": "a", "amount": 1, "note": "old"})
    cleaner = Cleaner(capture_of("debezium"), is_trusted=is_trusted)
    cleaner.take(database.log)
    for key in keys:
        database.write(key, {"note": "new"})
    database.log.clear()
    changed = resumed(cleaner)
    assert {one.reason for one in cleaner.held.values()} == {LOST}
    assert cleaner.held.keys() <= changed
    for key in keys:
        database.write(key, {"amount": 2})
    cleaner.take(database.log)
    assert len(cleaner.changes) == len(keys), "no row is completed with a state before the gap"
    waiting = [one for one in cleaner.held.values() if one.rows]
    assert len(waiting) == len(keys)
    assert all(one.needs_snapshot for one in waiting)
    if len(keys) > 1:
        assert {one.reason for one in waiting} == {PRIOR_UNKNOWN}, "clean requests the snapshot"
    database.log.clear()
    for key in keys:
        database.read(key)
        database.write(key, {"amount": 3})
    cleaner.take(database.log)
    assert not [one for one in cleaner.held.values() if one.rows]
    assert broken_laws(cleaner.changes, database.history, is_whole=False) == []
    last = {one.key: json.loads(one.current or b"{}") for one in cleaner.changes}
    assert {(one["amount"], one["note"]) for one in last.values()} == {(3, "new")}


@pytest.mark.parametrize("whole", ["a snapshot of the table", "an update"])
def test_a_whole_row_that_says_the_same_makes_a_state_certain_again(whole: str) -> None:
    database = Database("debezium, default")
    for key in (1, 2):
        database.write(key, {"name": "a", "amount": 1, "note": "old"})
    cleaner = Cleaner(capture_of("debezium"))
    cleaner.take(database.log)
    resumed(cleaner)
    database.log.clear()
    if whole == "an update":
        database.write(1, {"note": "new"})
        database.write(1, {"note": "old"})
        del database.log[0]
        database.history[1] = [database.rows[1]]
    else:
        database.read(1)
    database.write(1, {"amount": 2})
    cleaner.take(database.log)
    assert not [one for one in cleaner.held.values() if one.rows]
    assert json.loads(cleaner.changes[-1].current or b"{}")["amount"] == 2


def test_rows_without_positions_are_certain_again_after_a_whole_row() -> None:
    database = Database("canal")
    for key in (1, 2):
        database.write(key, {"name": "a", "amount": 1, "note": "old"})
    cleaner = Cleaner(capture_of("canal"))
    cleaner.take(database.log)
    resumed(cleaner)
    database.log.clear()
    database.write(1, None)
    database.write(1, {"name": "b"})
    database.write(1, {"amount": 2})
    database.write(2, {"amount": 2})
    cleaner.take(database.log)
    assert [one.key for one in cleaner.held.values() if one.rows] == ["2"]
    wanted = {1: database.history[1], 2: database.history[2][:1]}
    assert broken_laws(cleaner.changes, wanted) == []


def test_rows_of_an_entity_that_was_never_seen_go_on_behind_a_gap() -> None:
    database = Database("debezium, default")
    cleaner = Cleaner(capture_of("debezium"))
    assert resumed(cleaner) == set()
    database.write(1, {"name": "a", "note": "n"})
    database.write(1, {"amount": 2})
    cleaner.take(database.log)
    assert len(cleaner.changes) == 2
