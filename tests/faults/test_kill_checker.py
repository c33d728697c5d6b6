"""The checker of the kill tests sees what it must see: planted defects, one by one."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from decimal import Decimal

import pytest
from fault_app import parcel
from fault_harness import (
    Account,
    Committed,
    Lake,
    Letter,
    Seen,
    Tables,
    account_problems,
    acknowledged_problems,
    archive_problems,
    dead_problems,
    fold,
    log_problems,
    state_problems,
    view_problems,
)

PARTITIONS = 2


class World:
    """A right history of parcels: committed, in the log, in the views and in the archive."""

    def __init__(self) -> None:
        rng = random.Random(7)
        self.committed: list[Committed] = []
        self.log: list[Seen] = []
        self.ends = dict.fromkeys(range(PARTITIONS), 0)
        states: dict[str, tuple[int, object]] = {}
        for number in range(600):
            self._step(number, rng, states)
        for partition in self.ends:
            self.ends[partition] += 1  # a transaction's marker
        newest = {each.key: each for each in self.log}
        self.state = list(newest.values())
        self.tables: Tables = fold(self.log)
        self.tables.positions = {"parcel_latest": dict(self.ends), "heavy": dict(self.ends)}
        self.lake = Lake(
            rows=list(self.log),
            ranges=[(p, a, b) for p, e in self.ends.items() for a, b in ((0, 50), (50, e))],
        )

    def lines(self) -> list[str]:
        """What the writers noted: single changes, and set-based writes with their counts."""
        single = [each.change_id for each in self.committed if each.call is None]
        many = Counter(each.call for each in self.committed if each.call is not None)
        return [f"{one}\n" for one in (*single, *(f"{call} {n}" for call, n in many.items()))]

    def _step(self, number: int, rng: random.Random, states: dict[str, tuple[int, object]]) -> None:
        entity = parcel(rng)
        key = f"p-{int(entity.parcel_id[2:]) % 40}"
        version, before = states.get(key, (0, None))
        delete = before is not None and rng.random() < 0.15
        after = (
            None if delete else entity.model_copy(update={"parcel_id": key}).model_dump(mode="json")
        )
        kind = "deleted" if delete else "updated" if before is not None else "created"
        call = f"call-{number // 50}" if number % 3 == 0 else None
        change = Committed(f"id-{number}", key, version + 1, kind, before, after, call)
        states[key] = (version + 1, after)
        self.committed.append(change)
        value = json.dumps(
            {
                "id": change.change_id,
                "key": key,
                "version": change.version,
                "kind": kind,
                "originalEntityState": before,
                "currentEntityState": after,
                "provenance": {"correlationId": change.call},
            }
        )
        partition = int(key[2:]) % PARTITIONS
        offset = self.ends[partition]
        self.log.append(Seen(partition, offset, key.encode(), value.encode()))
        self.ends[partition] = offset + 1


@pytest.fixture
def world() -> World:
    return World()


def test_a_right_world_has_no_problems(world: World) -> None:
    assert log_problems(world.committed, world.log) == []
    assert view_problems(world.log, world.tables, world.ends) == []
    assert archive_problems(world.log, world.lake, world.ends) == []
    assert acknowledged_problems(world.committed, world.lines()) == []
    assert state_problems(world.log, world.state) == []
    assert account_problems(world.log, {}, Account(600, 0, 0, 0)) == []
    assert dead_problems(world.log, {}, []) == []


def test_a_lost_record_is_seen(world: World) -> None:
    lost = world.log.pop(300).message
    found = log_problems(world.committed, world.log)
    assert f"{lost['key']} version {lost['version']} ({lost['id']}) is lost" in found


def test_a_lost_last_record_is_seen(world: World) -> None:
    world.log.pop()
    assert len(log_problems(world.committed, world.log)) == 1


def test_a_doubled_record_is_seen(world: World) -> None:
    world.log.append(replace(world.log[-1], offset=world.log[-1].offset + 2))
    found = log_problems(world.committed, world.log)
    assert f"change {world.log[-1].message['id']} is in the log 2 times" in found


def test_two_swapped_versions_are_seen(world: World) -> None:
    same = [at for at, each in enumerate(world.log) if each.key == world.log[0].key][:2]
    first, second = (world.log[at] for at in same)
    world.log[same[0]] = replace(first, value=second.value)
    world.log[same[1]] = replace(second, value=first.value)
    assert any("follows version" in each for each in log_problems(world.committed, world.log))


def test_a_change_that_was_never_committed_is_seen(world: World) -> None:
    del world.committed[-1]
    assert any("never committed" in each for each in log_problems(world.committed, world.log))


def test_a_changed_state_in_the_log_is_seen(world: World) -> None:
    value = (world.log[5].value or b"").replace(b'"weight": ', b'"weight": 1')
    world.log[5] = replace(world.log[5], value=value)
    assert any("not as committed" in each for each in log_problems(world.committed, world.log))


def test_a_key_in_two_partitions_is_seen(world: World) -> None:
    world.log[-1] = replace(world.log[-1], partition=1 - world.log[-1].partition)
    assert any("also lives in" in each for each in log_problems(world.committed, world.log))


def test_a_changed_value_in_each_view_is_seen(world: World) -> None:
    key = next(k for k, (_, _, state) in world.tables.latest.items() if state is not None)
    version, change_id, state = world.tables.latest[key]
    world.tables.latest[key] = (version, change_id, {**state, "weight": 101})
    region = next(iter(world.tables.regions))
    count, fees, weight = world.tables.regions[region]
    world.tables.regions[region] = (count, fees + Decimal("0.01"), weight)
    world.tables.history.popitem()
    world.tables.heavy["p-none"] = ("north", 99)
    world.tables.positions["heavy"][0] -= 1
    found = view_problems(world.log, world.tables, world.ends)
    assert {each.partition(":")[0] for each in found} == {
        "latest",
        "history",
        "fees_by_region",
        "heavy",
        "position of heavy",
    }
    assert len(found) == 5


def test_a_duplicate_that_was_applied_twice_is_seen(world: World) -> None:
    region, (count, fees, weight) = next(iter(world.tables.regions.items()))
    world.tables.regions[region] = (count + 1, fees, weight)
    assert len(view_problems(world.log, world.tables, world.ends)) == 1


def test_a_group_that_should_be_gone_is_seen(world: World) -> None:
    world.tables.regions["mars"] = (0, Decimal(0), 0)
    found = view_problems(world.log, world.tables, world.ends)
    assert found == ["fees_by_region: 'mars' should not be there"]


def test_a_removed_and_a_doubled_archived_row_are_seen(world: World) -> None:
    removed = world.lake.rows.pop(100)
    world.lake.rows.append(world.lake.rows[3])
    found = archive_problems(world.log, world.lake, world.ends)
    assert f"archive: {removed.partition}@{removed.offset} is missing" in found
    assert any("is there 2 times" in each for each in found)
    assert len(found) == 2


def test_an_archived_row_that_differs_by_a_byte_is_seen(world: World) -> None:
    row = world.lake.rows[9]
    world.lake.rows[9] = replace(row, value=(row.value or b"") + b" ")
    assert len(archive_problems(world.log, world.lake, world.ends)) == 2


@pytest.mark.parametrize(("start", "problem"), [(40, "overlap"), (60, "hole")])
def test_ranges_that_do_not_tile_are_seen(world: World, start: int, problem: str) -> None:
    at = world.lake.ranges.index((1, 50, world.ends[1]))
    world.lake.ranges[at] = (1, start, world.ends[1])
    found = archive_problems(world.log, world.lake, world.ends)
    assert found == [f"archive: {problem} in partition 1: 50 to {start}"]


def test_an_archive_that_started_again_is_seen(world: World) -> None:
    """C25: a new app id and a checkpoint at the earliest offset append all again."""
    world.lake.ranges += [(p, 0, end) for p, end in world.ends.items()]
    world.lake.rows += world.log
    found = archive_problems(world.log, world.lake, world.ends)
    assert sum("overlap" in each for each in found) == PARTITIONS
    assert sum("2 times" in each for each in found) == len(world.log)


def test_an_acknowledged_write_that_the_store_lost_is_seen(world: World) -> None:
    lines = world.lines()
    single, of_many = world.committed.pop(50), world.committed.pop(59)
    assert (single.call, of_many.call) == (None, "call-1")
    assert acknowledged_problems(world.committed, [*lines, "cut"]) == [
        f"store: acknowledged change {single.change_id} is lost",
        "store: 16 of 17 changes of call call-1 are there",
    ]


def test_a_state_topic_that_is_not_the_newest_change_is_seen(world: World) -> None:
    """C7: a null for a deletion, an older version, a key that is missing."""
    grave = next(at for at, each in enumerate(world.state) if b'"deleted"' in (each.value or b""))
    world.state[grave] = replace(world.state[grave], value=None)
    older = next(each for each in world.log if each.key == world.state[grave - 1].key)
    world.state[grave - 1] = replace(world.state[grave - 1], value=older.value)
    gone = world.state.pop()
    found = state_problems(world.log, world.state)
    assert [each.partition(" is ")[0] for each in sorted(found)] == sorted(
        f".state: {key!r}" for key in (world.state[grave].key, world.state[grave - 1].key, gone.key)
    )


def test_an_account_that_forgets_a_record_is_seen(world: World) -> None:
    """Law 7: in = applied + duplicate + held + dead, each with its own number."""
    foreign = {(0, 3): "duplicate", (1, 4): "unreadable"}
    assert account_problems(world.log, foreign, Account(598, 1, 0, 1)) == []
    for wrong in (Account(599, 0, 0, 1), Account(598, 1, 0, 0), Account(597, 1, 1, 1)):
        assert len(account_problems(world.log, foreign, wrong)) == 1


def test_a_letter_that_is_lost_doubled_or_changed_is_seen(world: World) -> None:
    record = world.log[3]
    place = (record.partition, record.offset)
    letter = Letter(place, record.key, record.value)
    foreign = {place: "unreadable"}
    assert dead_problems(world.log, foreign, [letter]) == []
    assert dead_problems(world.log, foreign, []) == [f".dead: {place} is missing"]
    assert dead_problems(world.log, foreign, [letter] * 2) == [
        f".dead: {place} should not be there"
    ]
    assert len(dead_problems(world.log, foreign, [replace(letter, value=b"{}")])) == 2
