"""What the registry of views refuses by itself: whoever asks late, or twice, changes nothing."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from everstate.app import App
from everstate.cli import rebuild
from everstate.cli.asking import control_of
from everstate.cli.console import AppSession
from everstate.config import load
from everstate.errors import BuildFailed, InvalidQuery, NotFound, NoViews, VersionsDiffer
from everstate.pipeline.keeping.refresh import Refresher
from everstate.pipeline.proof import recompute as recomputing
from everstate.pipeline.reports import ProofOutcome, ViewReport
from everstate.views.changing import (
    ask_rebuild,
    ask_undo,
    cancel,
    drop,
    drop_unused,
    forget_version,
)
from everstate.views.control import (
    BUILDING,
    KEPT,
    LIVE,
    RETIRED,
    WAITING,
    Control,
    ViewVersion,
)
from everstate.views.stores import ViewTables
from everstate.views.versions import OnChange, Step, registered, steps
from kit.view_contract import TOTALS
from kit.view_orders import TYPES, VIEWS, orders
from kit.view_postgres import PostgresKeptOrders

(PLAN,) = (plan for plan in VIEWS if plan.name == TOTALS.view)


def next_version(kept: PostgresKeptOrders) -> int:
    """A second version of `totals`, built and published in place of the first."""
    control = kept.control
    made = ask_rebuild(control, PLAN.name)
    ViewTables(control).install(PLAN, made.version, TYPES[PLAN.name])
    control.open_positions(PLAN.name, made.version, "order", PLAN.fingerprint, {0: 0})
    with control.connection.transaction():
        ViewTables(control).point(PLAN, made.version)
        assert control.swap_published(PLAN.name, made.version - 1, made.version)
    return made.version


def published(kept: PostgresKeptOrders, before: int, version: int) -> None:
    with kept.control.connection.transaction():
        ViewTables(kept.control).point(PLAN, version)
        assert kept.control.swap_published(PLAN.name, before, version)


def numbers(control: Control) -> list[tuple[int, str]]:
    return [(row.version, row.status) for row in control.versions(PLAN.name)]


def test_a4_a_version_that_readers_see_is_neither_built_nor_dropped(
    kept: PostgresKeptOrders,
) -> None:
    """Whatever its status is said to be, as by a stale look."""
    control, log = kept.control, orders(3)
    kept.apply(0, 0, 3, log.between(0, 3))
    control.set_status(PLAN.name, 1, BUILDING)
    assert control.begin_build(PLAN.name, 1) is None
    forget_version(control, PLAN.name, 1)
    assert numbers(control) == [(1, BUILDING)]
    assert kept.vector(TOTALS) == {0: 3}
    assert kept.query("SELECT orders FROM totals") == [(3,)]


def test_a3_a_build_that_was_cancelled_ends_nothing_and_its_number_is_not_used_again(
    kept: PostgresKeptOrders,
) -> None:
    control = kept.control
    first = ask_rebuild(control, PLAN.name)
    attempt = control.begin_build(PLAN.name, first.version)
    assert attempt is not None
    cancel(control, PLAN.name)
    second = ask_rebuild(control, PLAN.name)
    later = control.begin_build(PLAN.name, second.version)
    assert later is not None
    for version in (first.version, second.version):
        assert not control.end_build(PLAN.name, version, attempt, {"vector": {}})
        assert not control.is_attempt(PLAN.name, version, attempt)
    assert [row.built for row in control.versions(PLAN.name) if row.version > 1] == [None]
    # Nor does an attempt that another one took over, as after a kill.
    last = control.begin_build(PLAN.name, second.version)
    assert last is not None
    assert control.is_emptied(PLAN.name, second.version)
    assert not control.end_build(PLAN.name, second.version, later, {"vector": {}})
    assert control.end_build(PLAN.name, second.version, last, {"vector": {}})
    assert not control.is_emptied(PLAN.name, second.version)
    assert control.begin_build(PLAN.name, second.version) is None  # by a stale look
    assert (first.version, second.version) == (2, 3)
    # Also after the view itself was dropped.
    control.set_status(PLAN.name, 1, RETIRED)
    cancel(control, PLAN.name)
    drop(control, PLAN.name)
    assert control.numbers()[PLAN.name] == 3


def met_at(control: Control) -> int:
    """The transaction in which the first version caught up, as it is recorded now."""
    control.caught_up(PLAN.name, 1)
    query = "SELECT met_at::text FROM {view} WHERE name = %s AND version = 1"
    return int(control.value(query, (PLAN.name,)))


def test_a7_a_version_that_moves_by_itself_has_not_caught_up_before(
    kept: PostgresKeptOrders,
) -> None:
    """Readers whose snapshots are of the time between would see its older rows."""
    control, log = kept.control, orders(4)
    kept.apply(0, 0, 2, log.between(0, 2))
    met = met_at(control)
    kept.apply(0, 2, 3, log.between(2, 3))
    assert met_at(control) == met, "it rode"
    kept.apply(0, 3, 4, log.between(3, 4), core=kept.without(PLAN.name))
    kept.trail(TOTALS, 0, 3, 4, log.between(3, 4))
    assert met_at(control) > met


def test_c14_a_replaced_version_is_dropped_only_while_nobody_goes_back_to_it(
    kept: PostgresKeptOrders,
) -> None:
    control = kept.control
    next_version(kept)
    assert drop_unused(control, hours=1.0) == []
    # What was listed a moment ago is an undo in progress by now.
    stale = control.unused(0.0)
    assert [row.version for row in stale] == [1]
    ask_undo(control, PLAN.name)
    listed = [stale]

    class Late(Control):
        def unused(self, hours: float) -> list[ViewVersion]:
            return listed.pop() if listed else super().unused(hours)

    assert drop_unused(Late(kept.connection, kept.schema_name), hours=0.0) == []
    assert numbers(control) == [(1, BUILDING), (2, LIVE)]
    assert kept.vector(TOTALS) == {0: 0}


def test_b9_who_has_a_replaced_version_open_holds_nobody_up(kept: PostgresKeptOrders) -> None:
    """As pg_dump has every table for hours; and as a view of somebody's own does."""
    control = kept.control
    next_version(kept)
    with psycopg.connect(kept.dsn) as reader:
        reader.execute("LOCK TABLE kept.totals__v1 IN ACCESS SHARE MODE")
        assert drop_unused(control, hours=0.0) == []
        assert numbers(control) == [(1, KEPT), (2, LIVE)]
        assert kept.vector(TOTALS) == {0: 0}
    kept.connection.execute("CREATE VIEW of_mine AS SELECT * FROM kept.totals__v1")
    assert drop_unused(control, hours=0.0) == []
    kept.connection.execute("DROP VIEW of_mine")
    assert [row.version for row in drop_unused(control, hours=0.0)] == [1]
    assert kept.query("SELECT to_regclass('kept.totals__v1') IS NULL") == [(True,)]
    with pytest.raises(NotFound, match="no older version"):
        ask_undo(control, PLAN.name)


def declaring(control: Control, fingerprint: str, on_change: OnChange = "rebuild") -> Step:
    """The step of a start that declares this meaning of the view."""
    (found,) = steps(
        "order",
        [replace(PLAN, fingerprint=fingerprint)],
        control.versions(PLAN.name),
        standing=[(PLAN.name, 1), (PLAN.name, 2)],
        numbers=control.numbers(),
        on_change=on_change,
    )
    return found


def test_a_command_that_waits_for_a_build_ends_with_the_reason_of_this_attempt(
    kept: PostgresKeptOrders,
) -> None:
    control, failed = kept.control, "view totals: its SQL has no such column."
    control.add_version(replace(registered(PLAN, 2, status=BUILDING), fingerprint="declared"))
    control.record(PLAN.name, 2, error=failed)
    wanted = ask_rebuild(control, PLAN.name)
    assert (wanted.version, control.versions(PLAN.name)[-1].error) == (2, None)
    control.record(PLAN.name, 2, error=failed)
    with control.duty("answers"), pytest.raises(BuildFailed) as told:
        rebuild._awaited(AppSession(Path("."), None), control, wanted)
    assert "version 2 of view totals cannot be built: its SQL has no such column." in str(
        told.value
    )
    assert control.versions(PLAN.name)[-1].status == BUILDING


def test_a_command_that_requires_equal_rows_ends_when_they_are_not(
    kept: PostgresKeptOrders,
) -> None:
    control = kept.control
    wanted = ask_rebuild(control, PLAN.name, require_equal=True)
    control.record(PLAN.name, wanted.version, built={})
    control.add_built(PLAN.name, wanted.version, {"different": 1200})
    with control.duty("answers"), pytest.raises(VersionsDiffer) as told:
        rebuild._awaited(AppSession(Path("."), None), control, wanted)
    assert "is not published: 1,200 rows differ" in str(told.value)
    assert control.versions(PLAN.name)[-1].status == BUILDING


@pytest.mark.parametrize("undo", [False, True])
def test_c14_no_start_builds_what_an_operator_cancelled(
    kept: PostgresKeptOrders, undo: bool
) -> None:
    control = kept.control
    next_version(kept)
    control.add_version(replace(registered(PLAN, 3, status=BUILDING), fingerprint="declared"))
    assert [row.version for row in cancel(control, PLAN.name)] == [3]
    assert numbers(control) == [(1, KEPT), (2, LIVE), (4, WAITING)]
    assert control.versions(PLAN.name)[-1].status_reason == (
        "its build was cancelled; `everstate views rebuild totals` builds it"
    )
    assert cancel(control, PLAN.name) == []
    kept_to, waiting = 2, 4
    if undo:
        assert ask_undo(control, PLAN.name).version == 1
        kept_to, waiting = 1, 5
    step = declaring(control, "declared")
    assert (step.what, step.version, step.superseded) == ("same", kept_to, ())
    if not undo:
        # Once the app has declared what readers see, the other meaning is a new wish.
        control.declared(replace(registered(PLAN, 2), fingerprint="declared"))
        assert declaring(control, "declared").what == "same"
        assert declaring(control, PLAN.fingerprint).superseded == (4,)
        control.declared(registered(PLAN, 2))
        assert declaring(control, "declared").what == "changed"
    assert ask_rebuild(control, PLAN.name).version == waiting


@pytest.mark.parametrize("status", [BUILDING, WAITING])
def test_c14_an_undo_stays_though_the_app_declares_what_was_being_built_or_waited(
    kept: PostgresKeptOrders, status: str
) -> None:
    """A start of the same app goes on with the undo; `views rebuild` builds what it declares."""
    control = kept.control
    next_version(kept)
    changed = replace(registered(PLAN, 3, status=status), fingerprint="declared")
    control.add_version(changed)
    assert ask_undo(control, PLAN.name).version == 1

    def step() -> Step:
        return declaring(control, "declared", "ask" if status == WAITING else "rebuild")

    assert numbers(control) == [(1, BUILDING), (2, LIVE), (4, WAITING)]
    assert (step().what, step().version, step().superseded) == ("same", 1, ())
    with control.connection.transaction():
        ViewTables(control).point(PLAN, 1)
        assert control.swap_published(PLAN.name, 2, 1)
    assert (step().what, step().version, step().superseded) == ("same", 1, ())
    assert ask_rebuild(control, PLAN.name).version == 4
    assert (step().what, step().version, step().superseded) == ("same", 1, ())
    assert numbers(control) == [(1, LIVE), (2, KEPT), (4, BUILDING)]


def test_an_undo_goes_back_to_what_readers_saw_last(kept: PostgresKeptOrders) -> None:
    control = kept.control
    next_version(kept)
    next_version(kept)
    assert ask_undo(control, PLAN.name).version == 2
    published(kept, 3, 2)
    control.add_version(replace(registered(PLAN, 4, status=BUILDING), fingerprint="declared"))
    ViewTables(control).install(PLAN, 4, TYPES[PLAN.name])
    published(kept, 2, 4)
    assert ask_undo(control, PLAN.name).version == 2
    published(kept, 4, 2)
    assert ask_undo(control, PLAN.name).version == 1


def test_a_view_that_no_app_declares_is_neither_built_again_nor_undone(
    kept: PostgresKeptOrders,
) -> None:
    control = kept.control
    next_version(kept)
    control.set_status(PLAN.name, 2, RETIRED)
    for request in (ask_rebuild, ask_undo):
        with pytest.raises(InvalidQuery, match="no app declares it any more"):
            request(control, PLAN.name)
    assert numbers(control) == [(1, KEPT), (2, RETIRED)]


def test_a_view_from_which_another_is_read_is_dropped_after_that(kept: PostgresKeptOrders) -> None:
    control = kept.control
    reading = replace(registered(PLAN, 1), name="reading", definition={"inputs": [PLAN.name]})
    control.add_version(replace(reading, status=RETIRED, published=True))
    control.set_status(PLAN.name, 1, RETIRED)
    with pytest.raises(InvalidQuery, match="a version of reading is read") as refused:
        drop(control, PLAN.name)
    assert "everstate views drop reading" in (refused.value.advice or "")
    assert [row.name for row in drop(control, "reading")] == ["reading"]
    assert numbers(control) == [(1, RETIRED)]


def test_commands_that_change_views_say_that_there_are_none_yet(
    database: str, tmp_path: Path
) -> None:
    config = load(tmp_path, store={"dsn": database})
    with pytest.raises(NoViews), control_of(config):
        pass


def test_sums_of_a_join_are_filled_again_before_an_undo_shows_them(
    kept: PostgresKeptOrders,
) -> None:
    control = kept.control
    reading = replace(registered(PLAN, 1), name="sums", definition={"inputs": [PLAN.name]})
    control.add_version(replace(reading, status=KEPT, built={"positions": {PLAN.name: {"0": 5}}}))
    control.add_version(replace(reading, version=2, published=True))
    assert ask_undo(control, "sums").version == 1
    assert next((row.status, row.built) for row in control.versions("sums")) == (BUILDING, None)


def test_only_views_that_differ_are_promoted_and_one_without_a_table_stops_no_other(
    kept: PostgresKeptOrders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, others = kept.control, [plan for plan in VIEWS if plan.rides and plan != PLAN]
    joined = replace(registered(PLAN, 1, published=True), name="joined")
    control.add_version(replace(joined, definition={"inputs": [PLAN.name]}))
    outcomes: dict[str, ProofOutcome] = {
        "joined": "differs",
        PLAN.name: "differs",
        others[0].name: "not all of the log was read",
    }
    reports = [ViewReport(name, 1, "order", how) for name, how in outcomes.items()]
    monkeypatch.setattr(recomputing, "verify_views", lambda *_, **__: reports)
    config = load(tmp_path, store={"dsn": kept.dsn}, views={"schema_name": kept.schema_name})
    spark: Any = None
    found = recomputing.recompute(spark, config, App("orders"), promote=True)
    assert found == (reports, [PLAN.name])
    assert numbers(control) == [(1, LIVE), (2, BUILDING)]
    assert [row.version for row in control.versions(others[0].name)] == [1]


def test_changed_keys_of_sums_that_are_not_refreshed_any_more_are_not_recorded(
    kept: PostgresKeptOrders, tmp_path: Path
) -> None:
    """Neither are their triggers dropped where a version is live again meanwhile, or is locked."""
    control, side = kept.control, f"{PLAN.name}__v1"
    built = {"tables": [side], "positions": {PLAN.name: {"0": 5}}}
    for number, status in enumerate((KEPT, RETIRED, LIVE), 1):
        row = replace(registered(PLAN, number), name="sums", definition={"inputs": [PLAN.name]})
        control.add_version(replace(row, status=status, built=built))
        marked = f"sums__v{number}"
        control.connection.execute(
            f"CREATE TABLE {kept.schema_name}.{marked}_changed AS SELECT 1 AS k; "
            f"CREATE FUNCTION {kept.schema_name}.{marked}_mark() RETURNS trigger "
            f"LANGUAGE plpgsql AS 'BEGIN INSERT INTO {kept.schema_name}.{marked}_changed "
            "VALUES (2); RETURN NULL; END'; "
            f"CREATE TRIGGER {marked}_update AFTER UPDATE ON {kept.schema_name}.{side} "
            f"FOR EACH STATEMENT EXECUTE FUNCTION {kept.schema_name}.{marked}_mark()".encode()
        )

    def recorded() -> list[int]:
        """How many changed keys each version has, after one more change."""
        control.connection.execute(f"UPDATE {kept.schema_name}.{side} SET n = n WHERE false")
        counts = [
            f"SELECT count(*) FROM {kept.schema_name}.sums__v{number}_changed"
            for number in (1, 2, 3)
        ]
        found = control.connection.execute(" UNION ALL ".join(counts).encode())
        return [int(row[0]) for row in found]

    config = load(tmp_path, store={"dsn": kept.dsn}, views={"schema_name": kept.schema_name})
    assert recorded() == [2, 2, 2]
    with closing(Refresher(config, App("orders"))) as refresher:
        with psycopg.connect(kept.dsn) as other:
            other.execute(f"LOCK TABLE {kept.schema_name}.{side} IN ACCESS SHARE MODE".encode())
            refresher.step()
        assert recorded() == [3, 3, 3]
        refresher.step()
        assert recorded() == [4, 4, 4]  # it looks again after a minute
    with closing(Refresher(config, App("orders"))) as refresher:
        refresher.step()
    assert recorded() == [0, 0, 5]
    kept_positions = {"positions": built["positions"]}
    assert [row.built for row in control.versions("sums")] == [
        kept_positions, kept_positions, built,
    ]  # fmt: skip


def test_tables_in_other_stores_are_known_until_they_are_dropped_there(
    kept: PostgresKeptOrders,
) -> None:
    """Also when a release that knows no other store has removed their version."""
    control = kept.control
    for number in (1, 2):
        made = registered(PLAN, number, status=BUILDING)
        control.add_version(replace(made, name="apart", definition={"store": "memory"}))
    attempts = [str(control.begin_build("apart", n))[:8] for n in (1, 1, 2)]
    for number, attempt in zip((1, 1, 2), attempts, strict=True):
        control.add_table("apart", number, "memory", attempt)

    places = [(*("apart", n, "memory"), a) for n, a in zip((1, 1, 2), attempts, strict=True)]
    assert control.left_tables() == places[:1]
    forget_version(control, "apart", 1)
    assert control.left_tables() == sorted(places[:2])
    control.remove_dropped()
    assert [row.version for row in control.versions("apart")] == [1, 2]
    control.connection.execute("DELETE FROM view WHERE name = 'apart' AND version = 2")
    assert control.left_tables() == sorted(places)
    for name, version, _, attempt in places:
        control.remove_table(name, version, attempt)
    control.remove_dropped()
    assert (control.left_tables(), control.versions("apart")) == ([], [])
