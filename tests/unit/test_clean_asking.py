"""Which held keys are asked for, when, and in how many signals; and what an answer comes to."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY

from clean_cases import Cleaner, Database, broken_laws, capture_of
from everstate.config import load
from everstate.errors import CaptureFailed, InvalidCapture, Unavailable
from everstate.sources.cdc.asking import AGAIN_S_MAX, KEYS_MAX, Asker, asker_of
from everstate.sources.cdc.completion import PRIOR_UNKNOWN, READ_BEFORE, WAITS_PARENT
from everstate.sources.cdc.database import from_raw
from everstate.sources.cdc.holding import HeldEntity
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.rows import behind
from everstate.sources.cdc.snapshots import Signalled, signal_keys

TABLE = "public.item"


class Asked:
    """A captured database as far as it is signalled."""

    def __init__(self) -> None:
        self.signals: list[tuple[str, list[Mapping[str, Any]]]] = []
        self.refused: dict[int, str] = {}
        self.is_away = False

    def __call__(self, table: str, keys: Sequence[Mapping[str, Any]]) -> Signalled:
        if self.is_away:
            raise Unavailable("the database is away.")
        self.signals.append((table, list(keys)))
        return Signalled(f"signal {len(self.signals)}", self.refused)


class Rig:
    """An asker without its thread, a database, and a clock."""

    def __init__(self, name: str = "shop") -> None:
        self.now_s = 0.0
        self.asked = Asked()
        self.asker = Asker(name, self.asked, clock=lambda: self.now_s)

    def hold(self, key: int, reason: str = PRIOR_UNKNOWN, table: str = TABLE) -> None:
        held = held_of(key, reason, table)
        self.asker.note((held.entity, held.key), held)

    def after(self, seconds: float) -> int:
        self.now_s += seconds
        return self.asker.step()


def held_of(key: int, reason: str = PRIOR_UNKNOWN, table: str = TABLE) -> HeldEntity:
    row = CleanRow(table=table, op="u", key=str(key), columns={"id": key}, known={"id": key})
    return HeldEntity(table, table, str(key), {"id": key}, reason, 0.0, [row])


def test_a_key_is_asked_for_once_and_again_after_a_growing_time() -> None:
    rig = Rig()
    rig.hold(7)
    assert [rig.after(1), rig.after(1), rig.after(20)] == [1, 0, 0]
    assert rig.asked.signals == [(TABLE, [{"id": 7}])]
    waits = []
    for _ in range(8):
        began = rig.now_s
        while not rig.after(1):
            pass
        waits.append(rig.now_s - began)
    assert waits == [9, 60, 120, 240, 480, 600, 600, 600]
    rig.asker.note((TABLE, "7"), None)
    assert rig.after(2 * AGAIN_S_MAX) == rig.asker.waiting == 0


def test_many_keys_of_a_table_go_in_one_signal_and_more_in_the_next() -> None:
    rig = Rig("shop_of_many")
    for key in range(KEYS_MAX + 50):
        rig.hold(key)
    rig.hold(1, table="public.other")
    assert rig.after(1) == KEYS_MAX + 1
    assert [(table, len(keys)) for table, keys in rig.asked.signals] == [
        (TABLE, KEYS_MAX),
        ("public.other", 1),
    ]
    assert rig.after(1) == 50
    counted = REGISTRY.get_sample_value(
        "everstate_clean_snapshots_asked_total", {"capture": "shop_of_many"}
    )
    assert counted == KEYS_MAX + 51


def test_rows_that_wait_for_their_parent_are_not_asked_for() -> None:
    rig = Rig()
    rig.hold(1, WAITS_PARENT)
    empty = HeldEntity(TABLE, TABLE, "2", {}, "a row was refused", 0.0, [], is_unsure=True)
    rig.asker.note((TABLE, "2"), empty)
    assert rig.after(1) == rig.asker.waiting == 0
    rig.hold(1, PRIOR_UNKNOWN)
    assert rig.after(1) == 1, "its parent came, and its own state is unknown"


def test_a_database_that_is_away_is_asked_later_and_the_keys_stay_due() -> None:
    rig = Rig()
    rig.asked.is_away = True
    rig.hold(1)
    assert rig.after(1) == 0
    rig.asked.is_away = False
    assert rig.after(0.5) == 0, "not before a second has passed"
    assert rig.after(0.5) == 1


def test_a_restart_asks_again_and_what_is_held_no_more_is_forgotten() -> None:
    rig = Rig()
    for key in (1, 2):
        rig.hold(key)
    assert rig.after(1) == 2
    rig.asker.renew({(TABLE, "2"): held_of(2), (TABLE, "3"): held_of(3)})
    assert rig.after(1) == 1
    assert rig.asked.signals[-1] == (TABLE, [{"id": 3}])
    assert rig.asker.waiting == 2


def test_a_key_that_no_condition_can_be_made_of_is_told_and_does_not_stop_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()
    rig.asked.refused = {1: "id is a whole number"}
    for key in range(3):
        rig.hold(key)
    with caplog.at_level(logging.WARNING):
        assert rig.after(1) == 2
    assert "id is a whole number" in caplog.text
    rig.asked.refused = {}
    assert rig.after(31) == 2


def test_without_a_database_of_ours_it_is_told_once_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asker = asker_of(load(), capture_of("debezium"))
    with caplog.at_level(logging.WARNING):
        for key in (1, 2):
            asker.note((TABLE, str(key)), held_of(key))
    assert caplog.text.count("everstate cdc held shop") == 1
    asker.begin()
    assert asker.step() == asker.waiting == 0
    asker.close()


class FakeCapturing:
    """A capture whose database refuses keys that are no numbers."""

    def __init__(self) -> None:
        self.signals: list[dict[str, Any]] = []

    def database(self) -> FakeCapturing:
        return self

    def __enter__(self) -> FakeCapturing:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def condition(self, table: str, key: Mapping[str, Any], *, is_raw: bool = False) -> str:
        assert is_raw
        if not isinstance(key["id"], int):
            raise InvalidCapture("shop", f"{table}: {key['id']}")
        return f"(id = {key['id']})"

    def check_condition(self, table: str, condition: str) -> None:
        assert condition.startswith("(id = "), table

    def signal(self, signal_id: str, kind: str, data: str) -> None:
        assert (kind, signal_id.partition("-")[0]) == ("execute-snapshot", "everstate")
        self.signals.append(json.loads(data))


def test_one_signal_asks_for_all_keys_that_fit() -> None:
    capturing: Any = FakeCapturing()
    done = signal_keys(capturing, TABLE, [{"id": number} for number in range(3)])
    assert done.refused == {}
    (data,) = capturing.signals
    assert data == {
        "data-collections": [TABLE],
        "type": "INCREMENTAL",
        "additional-conditions": [
            {"data-collection": TABLE, "filter": "((id = 0) OR (id = 1) OR (id = 2))"}
        ],
    }


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ("public.order lines", 'public."order lines"'),
        ('public.a "b"', 'public."a ""b"""'),
        ("public.a$b", "public.a$b"),
    ],
)
def test_a_signal_has_an_unusual_name_of_a_table_as_debezium_reads_it(
    table: str, name: str
) -> None:
    """It skips a name with a blank without a word to us, and takes a name for an expression."""
    capturing: Any = FakeCapturing()
    signal_keys(capturing, table, [{"id": 1}])
    (data,) = capturing.signals
    assert data["data-collections"] == [name]
    assert data["additional-conditions"][0]["data-collection"] == rf"\Q{name}\E"


def test_keys_that_do_not_fit_are_refused_and_the_others_are_asked_for() -> None:
    capturing: Any = FakeCapturing()
    keys: list[dict[str, Any]] = [{"id": number} for number in range(100)]
    keys[17], keys[90] = {"id": "x"}, {"id": "y"}
    done = signal_keys(capturing, TABLE, keys)
    assert sorted(done.refused) == [17, 90]
    (data,) = capturing.signals
    assert data["additional-conditions"][0]["filter"].count("id = ") == 98
    done = signal_keys(capturing, TABLE, [{"id": "z"}] * 200)
    assert (done.id, len(done.refused)) == (None, 200)
    assert signal_keys(capturing, TABLE, []).id is None
    assert len(capturing.signals) == 1


@pytest.mark.parametrize(
    ("value", "kind", "wanted"),
    [
        (7, "integer", "7"),
        (20_454, "date", "2026-01-01"),
        (1_000_001, "timestamp without time zone", "1970-01-01 00:00:01.000001"),
        (1_000_000, "datetime", "1970-01-01 00:00:01"),
        (3_600_000_000, "time without time zone", "01:00:00"),
        ("2026-01-01T00:00:00Z", "timestamp with time zone", "2026-01-01T00:00:00Z"),
        ("AQI=", "bytea", b"\x01\x02"),
        (True, "boolean", "True"),
        ("12.50", "numeric(12,2)", "12.50"),
    ],
)
def test_values_of_raw_topics_become_values_of_sql(value: Any, kind: str, wanted: Any) -> None:
    assert from_raw(value, kind) == wanted


@pytest.mark.parametrize(("value", "kind"), [(10**9, "date"), ({"a": 1}, "point"), ("é", "bytea")])
def test_values_that_cannot_be_told_in_sql_are_refused(value: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_raw(value, kind)


def test_what_a_capture_gives_again_is_not_put_over_a_row_that_was_read_later() -> None:
    database = Database("debezium, default")
    database.write(1, {"name": "a", "note": "long"})
    database.log.clear()
    database.write(1, {"name": "b"})
    database.write(1, {"name": "c"})
    late = list(database.log)
    cleaner = Cleaner(capture_of("debezium"))
    cleaner.take(late)
    database.log.clear()
    database.read(1)
    database.write(1, {"amount": 5})
    cleaner.take(database.log[:1])
    assert not cleaner.held
    batch = cleaner.take(late)
    assert batch.skipped == {READ_BEFORE: 2}
    cleaner.take(database.log[1:])
    names = [json.loads(one.current or b"{}")["name"] for one in cleaner.changes]
    assert names == ["c", "c"]
    assert broken_laws(cleaner.changes, database.history, is_whole=False) == []


def test_a_place_right_behind_others_is_after_them_and_before_the_next() -> None:
    found = behind([{"lsn": [1, 100, 2]}, {"lsn": [1, 90, 9], "other": [1]}, {}])
    assert found == {"lsn": [1, 100, 2, 1], "other": [1, 1]}
    assert [1, 100, 2] < cast("list[int]", found["lsn"]) < [1, 100, 3]
    assert behind([{}]) == {}


def test_a_refusal_of_the_whole_database_is_put_off_longer_each_time() -> None:
    tries = []

    def ask(table: str, keys: Sequence[Mapping[str, Any]]) -> Signalled:
        tries.append(now[0])
        raise CaptureFailed("shop: signalling: refused.")

    now = [0.0]
    asker = Asker("shop", ask, clock=lambda: now[0])
    asker.note((TABLE, "1"), held_of(1))
    while now[0] < 20:
        asker.step()
        now[0] += 1
    assert tries == [0, 1, 3, 7, 15]
