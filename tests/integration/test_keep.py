"""The keeper and its proof, on a real log, a real database and Spark."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from decimal import Decimal

import pytest
from keep_cases import World, drain, orders_app
from prometheus_client import Gauge
from prometheus_client.samples import Sample

from everstate.changes import new_change_id
from everstate.errors import LogIdentityChanged
from everstate.log.record import OutRecord
from everstate.log.topics import Topics
from everstate.parts import Journal, Part, run_parts, states_folder
from everstate.pipeline.keeping.dead import DeadLetterSender
from everstate.pipeline.keeping.keep import Keeper
from everstate.pipeline.keeping.metrics import BEHIND, VERSION_FIELDS
from everstate.postgres import connect_views
from everstate.views.changing import forget_view
from everstate.views.control import RETIRED, Control

BY_COUNTRY = "SELECT country, orders, amount FROM by_country ORDER BY country NULLS LAST"


def test_views_follow_creates_updates_group_changes_deletes_and_duplicates(world: World) -> None:
    keeper = world.keeper()
    records = [world.put(f"o-{n}", "NL" if n % 2 else None, "10.50") for n in range(40)]
    records += [world.put(f"o-{n}", "BE", "100.00") for n in range(10)]
    records += [world.change("o-39", None), world.put("o-39", "NL", "1.00")]
    world.send(*records)
    assert drain(keeper) == (52, 0, 0, 0)
    once = world.rows(BY_COUNTRY)
    assert once == [
        ("BE", 10, Decimal("1000.00")),
        ("NL", 15, Decimal("148.00")),
        (None, 15, Decimal("157.50")),
    ]
    assert world.rows(
        "SELECT count(*), min(version), max(version) FROM ordr_latest WHERE key = 'o-39'"
    ) == [(1, 3, 3)]
    assert len(world.rows("SELECT * FROM large")) == 10
    world.send(*records[:30])  # law 2: written twice, applied once
    assert drain(keeper) == (0, 30, 0, 0)
    assert world.rows(BY_COUNTRY) == once
    reports = world.verify()
    assert [r.name for r in reports.values() if not r.holds] == []
    assert reports["ordr_history"].kept_rows == 52
    keeper.close()


def test_c19_unreadable_records_and_conflicts_are_dead_once_and_byte_exact(world: World) -> None:
    keeper = world.keeper()
    good = world.put("o-1", "NL", "10.00")
    clash = OutRecord(
        world.topic, good.key, (good.value or b"").replace(b'"NL"', b'"DE"'), good.headers
    )
    fresh_id = (clash.value or b"").replace(
        (good.value or b"")[7:43], str(new_change_id()).encode()
    )
    conflict = OutRecord(world.topic, good.key, fresh_id, [*good.headers, ("x", b"\x00\xff")])
    malformed = OutRecord(world.topic, b"o-2", b"{not json", [("trace", b"\x01")])
    tombstone = OutRecord(world.topic, b"o-3", None, [])
    no_key = OutRecord(world.topic, None, good.value, [], partition=0)
    early = world.put("o-4", "NL", "1.00")
    assert early.value is not None
    no_year = early.value.replace(b"2026-11-21T08:00:00Z", b"0001-01-01T00:00:00+12:00", 1)
    outside = OutRecord(world.topic, early.key, no_year, early.headers)
    world.send(good, conflict, malformed, tombstone, no_key, outside)
    assert drain(keeper) == (1, 0, 0, 5)
    keeper.close()
    sender = DeadLetterSender(world.config)
    while sender.step():
        pass
    assert sender.step() == 0
    sender.close()
    letters = world.letters()
    by_reason = {
        (dict(letter.headers)["everstate_reason"] or b"").decode(): letter for letter in letters
    }
    assert len(letters) == 5
    wanted = {"malformed", "tombstone", "no_key", "wrong_type:occurredAt"}
    assert wanted < by_reason.keys()
    assert by_reason["malformed"].value == b"{not json"
    assert by_reason["malformed"].headers[0] == ("trace", b"\x01")
    (clashed,) = [letter for letter in letters if letter.value == fresh_id]
    assert ("x", b"\x00\xff") in clashed.headers
    assert [r.name for r in world.verify().values() if not r.holds] == []


def test_a_dead_letter_of_a_topic_that_was_made_again_is_not_another_record(world: World) -> None:
    keeper = world.keeper()
    world.send(world.put("o-1", "NL", "10.00"), OutRecord(world.topic, b"o-2", b"{not json", []))
    assert drain(keeper) == (1, 0, 0, 1)
    keeper.close()
    world.change_tables("UPDATE dead SET raw_value = '{of the topic before'")
    with closing(DeadLetterSender(world.config)) as sender:
        assert (sender.step(), sender.step()) == (1, 0)
    (letter,) = world.letters()
    assert (letter.key, letter.value) == (b"o-2", b"{of the topic before")
    assert letter.headers[0] == ("everstate_headers", b"lost with the log's record")


def test_c14_a_gap_holds_later_versions_and_is_released_in_order(world: World) -> None:
    keeper = world.keeper()
    first, lost, third = (world.put("o-1", "NL", a) for a in ("1.00", "2.00", "3.00"))
    world.send(first, third)
    assert drain(keeper) == (1, 0, 1, 0)
    assert world.rows(BY_COUNTRY) == [("NL", 1, Decimal("1.00"))]
    assert [r.name for r in world.verify().values() if not r.holds] == []
    world.send(lost)
    assert drain(keeper)[0] == 2
    assert world.rows(BY_COUNTRY) == [("NL", 1, Decimal("3.00"))]
    assert world.wrong() == []
    keeper.close()


def test_c15_a_new_view_catches_up_from_the_log_and_is_published(
    world: World,
) -> None:
    keeper = world.keeper()
    world.send(*[world.put(f"o-{n}", "NL", "5.00", parts=n) for n in range(30)])
    drain(keeper)
    keeper.close()
    world.app = orders_app(("parts", "SELECT sum(parts) AS parts, count(*) AS orders FROM ordr"))
    keeper = world.keeper()
    how = "SELECT version, status, published FROM view WHERE name = 'parts'"
    assert world.rows(how) == [(1, "building", False)]
    drain(keeper)
    assert keeper.step() is None
    assert world.rows(how) == [(1, "live", True)]
    assert world.rows("SELECT parts, orders FROM parts") == [(sum(range(30)), 30)]
    assert world.wrong() == []
    keeper.close()


def test_c13_a_view_whose_sql_fails_is_behind_alone(world: World) -> None:
    world.app = orders_app(
        (
            "share",
            "SELECT country, sum(CAST(60 DIV parts AS BIGINT)) AS share FROM ordr GROUP BY country",
        )
    )
    keeper = world.keeper()
    world.send(world.put("o-1", "NL", "5.00", parts=2))
    drain(keeper)
    world.send(world.put("o-2", "NL", "5.00", parts=0))
    keeper.step()
    assert world.rows(BY_COUNTRY) == [("NL", 2, Decimal("10.00"))], "in the same step"
    ((status, reason),) = world.rows("SELECT status, error FROM view WHERE name = 'share'")
    assert status == "live", "readers see it as it was"
    assert "zero" in reason.lower()
    journal = Journal("pipeline", states_folder(world.config.project.data_dir))

    told: dict[str, Part] = {}

    def keep(stop: threading.Event) -> None:
        with closing(keeper):
            drain(keeper)
            keeper.step()
            told.update(journal.state.parts)
            # Another start of the project declares it no more, and then it is dropped.
            with connect_views(world.config.views_dsn) as connection:
                control = Control(connection, world.config.views.schema_name)
                control.set_status("share", 1, RETIRED)
                assert behind("share") == 1
                keeper.step()
                assert behind("share") is None
                assert "view share" not in journal.state.parts
                forget_view(control, "share")
                keeper.step()
        stop.set()

    run_parts(journal, {"keeper": keep}, threading.Event())
    assert not [s for s in samples(VERSION_FIELDS) if s.labels["view"] == "share"]
    assert world.rows(BY_COUNTRY) == [("NL", 2, Decimal("10.00"))]
    # What `everstate status` and `everstate run` show.
    assert {name: part.state for name, part in told.items() if name.startswith("view")} == {
        "view by_country": "running",
        "view large": "running",
        "view ordr_history": "running",
        "view ordr_latest": "running",
        "view share": "waiting",
    }
    assert "zero" in (told["view share"].reason or "").lower()


def behind(view: str) -> float | None:
    """What the metrics say of a view; ``None``: nothing."""
    return next((s.value for s in samples(BEHIND) if s.labels["view"] == view), None)


def samples(gauge: Gauge) -> list[Sample]:
    return [sample for metric in gauge.collect() for sample in metric.samples]


DEFECTS = {
    "by_country": "UPDATE by_country__v1 SET n = n + 1",
    "ordr_latest": "UPDATE ordr_latest__v1 SET state = state || '{\"parts\": 7}'",
    "ordr_history": "UPDATE ordr_history__v1 SET version = 9 WHERE key = 'o-3'",
    "large": "UPDATE large__v1 SET c1 = c1 + 0.01",
}


def test_verify_sees_each_planted_defect(world: World) -> None:
    keeper = world.keeper()
    world.send(*[world.put(f"o-{n}", "NL", "150.00") for n in range(5)])
    drain(keeper)
    keeper.close()
    for defect in DEFECTS.values():
        world.change_tables(defect)
    reports = world.verify()
    assert {name for name, report in reports.items() if not report.holds} == DEFECTS.keys()
    assert all(reports[name].differences for name in DEFECTS)
    world.change_tables("UPDATE ordr_latest__v1 SET state = state || '{\"parts\": 1}'")
    assert world.proof("ordr_latest").holds
    world.change_tables("DELETE FROM ordr_latest__v1 WHERE key = 'o-3'")
    (lost,) = world.proof("ordr_latest").differences
    assert "o-3" in str(lost)


WHO_AND_WHY = {
    "o-0": ("ordr_latest", """provenance = '{"identifier": "somebody else"}'"""),
    "o-1": ("ordr_history", """provenance = '{"identifier": "somebody else"}'"""),
    "o-2": ("ordr_history", """transaction = '{"id": "1", "index": 0, "count": 1}'"""),
    "o-3": ("ordr_history", """event = '{"type": "guessed"}'"""),
}
"""Key → the table in which its row is changed, and how."""


def test_verify_sees_who_changed_an_entity_and_why(world: World) -> None:
    keeper = world.keeper()
    world.send(*[world.put(key, "NL", "150.00") for key in WHO_AND_WHY])
    drain(keeper)
    keeper.close()
    assert all(report.holds for report in world.verify().values())
    for key, (view, changed) in WHO_AND_WHY.items():
        world.change_tables(f"UPDATE {view}__v1 SET {changed} WHERE key = '{key}'")
    for view in ("ordr_latest", "ordr_history"):
        differences = world.proof(view).differences
        found = sorted((json.loads(other.key)[0], other.what) for other in differences)
        assert found == [(key, "different") for key, (of, _) in WHO_AND_WHY.items() if of == view]


def test_c11_two_keepers_apply_every_change_once(world: World) -> None:
    keepers = [world.keeper(), world.keeper()]
    world.send(*[world.put(f"o-{n}", "NL", "1.00") for n in range(200)])

    def race(keeper: Keeper) -> None:
        drain(keeper)
        keeper.close()

    threads = [threading.Thread(target=race, args=(keeper,)) for keeper in keepers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert world.rows(BY_COUNTRY) == [("NL", 200, Decimal("200.00"))]
    assert world.rows("SELECT sum(applied) FROM counters") == [(200,)]


def test_c8_a_topic_made_again_is_not_read(world: World) -> None:
    keeper = world.keeper()
    world.send(world.put("o-1", "NL", "5.00"))
    drain(keeper)
    with Topics(world.config) as topics:
        topics.delete([world.topic])
        topics.ensure(["ordr"])
    world.send(world.put("o-1", "BE", "5.00"))
    with pytest.raises(LogIdentityChanged):
        keeper.step()
    keeper.close()
    with closing(Keeper(world.spark, world.config, world.app)) as another:
        with pytest.raises(LogIdentityChanged):
            another.prepare()
    assert world.rows(BY_COUNTRY) == [("NL", 1, Decimal("5.00"))]


def test_c19_the_rules_are_planned_only_where_a_record_needs_them(world: World) -> None:
    keeper = world.keeper()

    def has_rules() -> bool:
        (unit,) = keeper._units(frozenset({"ordr"}))
        plan = keeper._job(unit)._jdf.queryExecution().executedPlan().toString()
        return "wrong_type:occurredAt" in plan

    world.send(*[world.put(f"o-{n}", "NL", "5.00") for n in range(20)])
    assert not has_rules()
    assert drain(keeper) == (20, 0, 0, 0)
    # Readable, but not plainly so: every other partition's changes are applied once all the same.
    odd = world.put("o-1", "BE", "5.00")
    upper = (odd.value or b"")[:7] + (odd.value or b"")[7:43].upper() + (odd.value or b"")[43:]
    assert upper != odd.value
    world.send(
        OutRecord(world.topic, odd.key, upper, odd.headers),
        *[world.put(f"x-{n}", "NL", "5.00") for n in range(20)],
        OutRecord(world.topic, b"o-2", b"{not json", []),
    )
    assert not has_rules()
    assert drain(keeper) == (21, 0, 0, 1)
    world.send(world.put("o-3", "NL", "6.00"))
    assert has_rules()
    assert drain(keeper) == (1, 0, 0, 0)
    assert world.rows(BY_COUNTRY) == [("BE", 1, Decimal("5.00")), ("NL", 39, Decimal("196.00"))]
    assert world.rows("SELECT sum(applied), sum(dead) FROM counters") == [(42, 1)]
    assert world.wrong() == []
    keeper.close()


def test_c12_the_keepers_plan_moves_no_row_between_tasks(world: World) -> None:
    keeper = world.keeper()
    world.send(*[world.put(f"o-{n}", "NL", "5.00") for n in range(20)])
    (unit,) = keeper._units(frozenset({"ordr"}))
    plan = keeper._job(unit)._jdf.queryExecution().executedPlan().toString()
    assert "MapInArrow" in plan
    assert "Exchange" not in plan
    assert "Sort" not in plan
    assert drain(keeper)[0] == 20
    keeper.close()


def test_c14_a_partition_that_would_hold_too_much_waits_and_the_others_go_on(world: World) -> None:
    first, *later = (world.put("o-1", "NL", f"{n}.00") for n in range(1, 6))
    lost, *held = later
    others = [world.put(f"x-{n}", "BE", "1.00") for n in range(20)]
    pipeline = world.config.pipeline
    keeper = world.keeper(held_max=2)
    world.send(first, *held, *others)
    drain(keeper)
    ((reason,),) = world.rows("SELECT error FROM view WHERE error IS NOT NULL")
    assert "3 changes wait behind version gaps, and pipeline.held_max is 2" in reason
    assert world.rows("SELECT version FROM ordr_latest WHERE key = 'o-1'") == [(1,)]
    assert world.rows("SELECT count(*) > 5 FROM ordr_latest") == [(True,)]
    keeper.close()
    keeper = world.keeper(held_max=pipeline.held_max)
    drain(keeper)
    world.send(lost)
    drain(keeper)
    assert world.rows(BY_COUNTRY) == [("BE", 20, Decimal("20.00")), ("NL", 1, Decimal("5.00"))]
    assert world.rows("SELECT sum(applied), sum(held) FROM counters") == [(25, 0)]
    assert world.rows("SELECT DISTINCT status, error FROM view") == [("live", None)]
    keeper.close()
