"""A view that changes: a new version is built beside the one that readers see, and published."""

from __future__ import annotations

import threading
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import psycopg
import pytest
from keep_cases import CHANGED, HOW, Order, World, begun, changed_app, drain, orders_app
from pydantic import BaseModel, Field

from everstate.app import App
from everstate.cli.plan import planned
from everstate.cli.proofs import prove
from everstate.errors import ArchiveError, EverstateError, InvalidQuery, NotFound, PublishRefused
from everstate.pipeline.keeping import build, trail
from everstate.pipeline.keeping.alone import build_until
from everstate.pipeline.requests.answers import Answers
from everstate.views.changing import ask_rebuild, ask_undo, cancel, drop
from everstate.views.control import Control, ViewVersion
from everstate.views.kinds import ViewPlan
from everstate.views.stores import ViewTables
from everstate.views.tables import HOME
from kit.settings import altered


def holding(world: World) -> list[str]:
    return [report.name for report in world.verify().values() if not report.holds]


def test_changed_sql_is_built_beside_the_old_version_and_published(world: World) -> None:
    begun(world)
    world.app = changed_app(CHANGED)
    before = world.rows(HOW)
    _, plan = planned(world.config, world.app)
    (step,) = plan.views
    assert (step.view, step.what, step.why, step.version) == ("by_country", "changed", "its SQL", 2)
    assert (step.reads_changes, step.reads_bytes > 0, step.seconds > 0) == (30, True, True)
    assert (plan.models, plan.is_first, world.rows(HOW)) == ((), False, before)
    keeper = world.keeper()
    assert world.rows(HOW) == [(1, "live", True), (2, "building", False)]
    assert world.rows("SELECT orders, amount FROM by_country WHERE country = 'NL'") != []
    world.send(world.put("o-99", "NL", "7.00", parts=9))
    assert keeper.builder.step() is not None
    # The old version is kept meanwhile.
    drain(keeper)
    assert world.rows(HOW) == [(1, "kept", False), (2, "live", True)]
    assert sorted(world.rows("SELECT country, orders, parts FROM by_country")) == [
        ("BE", 10, 30),
        ("NL", 11, 29),
    ]
    assert holding(world) == []
    world.send(world.put("o-98", "NL", "7.00", parts=1))
    assert drain(keeper) == (1, 0, 0, 0)
    assert world.rows("SELECT parts FROM by_country WHERE country = 'NL'") == [(30,)]
    keeper.close()


@pytest.mark.full
def test_another_text_of_the_same_meaning_builds_nothing(world: World) -> None:
    begun(world)
    text = orders_app().views["by_country"].sql.replace("FROM ordr", "FROM  ordr  -- orders\n")
    world.app = changed_app(text)
    with closing(world.keeper()) as keeper:
        drain(keeper)
        assert world.rows(HOW) == [(1, "live", True)]
        assert world.rows(
            "SELECT definition->>'sql' = $$" + text + "$$ FROM view WHERE name = 'by_country'"
        ) == [(True,)]
        assert holding(world) == []


@pytest.mark.full
def test_ask_waits_for_the_verb_and_readers_keep_the_old_version(
    world: World, control: Control
) -> None:
    begun(world)
    world.config = altered(world.config, views={"on_change": "ask"})
    world.app = changed_app(CHANGED)
    with closing(world.keeper()) as keeper:
        world.send(world.put("o-99", "NL", "7.00"))
        drain(keeper)
        assert world.rows(HOW) == [(1, "live", True), (2, "waiting", False)]
        (asked,) = [row for row in control.versions("by_country") if row.status == "waiting"]
        assert "everstate views rebuild by_country" in (asked.status_reason or "")
        assert world.rows("SELECT sum(orders) FROM by_country") == [(21,)]
        ask_rebuild(control, "by_country")
        drain(keeper)
        assert world.rows(HOW) == [(1, "kept", False), (2, "live", True)]


def of_another_model(row: ViewVersion) -> None:
    raise InvalidQuery(f"version {row.version} is of another model")


def test_undo_goes_back_to_the_version_before_which_catches_up_first(
    world: World, control: Control
) -> None:
    begun(world)
    world.app = changed_app(CHANGED)
    with closing(world.keeper()) as keeper:
        drain(keeper)
        world.send(world.put("o-99", "NL", "7.00"))
        drain(keeper)
        with pytest.raises(InvalidQuery, match="version 1 is of another model"):
            ask_undo(control, "by_country", check=of_another_model)
        assert world.rows(HOW) == [(1, "kept", False), (2, "live", True)]
        assert ask_undo(control, "by_country").version == 1
        drain(keeper)
        assert world.rows(HOW) == [(1, "live", True), (2, "kept", False)]
        amounts = "SELECT country, orders, amount FROM by_country ORDER BY country"
        assert world.rows(amounts) == [("BE", 10, Decimal(60)), ("NL", 11, Decimal(57))]
        for name in ("large", "by_country"):
            with pytest.raises(NotFound, match="no older version"):
                ask_undo(control, name)
    # It rode from the first change, so nothing was built; and a start leaves it.
    assert world.rows("SELECT built FROM view WHERE name = 'by_country' AND published") == [({},)]
    with closing(world.keeper()) as keeper:
        drain(keeper)
        assert world.rows(HOW) == [(1, "live", True), (2, "kept", False)]
        assert ask_rebuild(control, "by_country").version == 2
        drain(keeper)
        assert world.rows(HOW) == [(1, "kept", False), (2, "live", True)]
    assert holding(world) == []


def test_a_second_undo_goes_back_one_version_more_and_the_third_says_that_there_is_none(
    world: World, control: Control
) -> None:
    begun(world)
    for sql in (CHANGED, CHANGED.replace("AS parts", "AS pieces")):
        world.app = changed_app(sql)
        with closing(world.keeper()) as keeper:
            drain(keeper)
    assert world.rows(HOW) == [(1, "kept", False), (2, "kept", False), (3, "live", True)]
    with closing(world.keeper()) as keeper:
        for back in (2, 1):
            assert ask_undo(control, "by_country").version == back
            drain(keeper)
            assert world.rows(f"{HOW.partition(' ORDER')[0]} AND published") == [
                (back, "live", True)
            ]
        with pytest.raises(NotFound, match="no older version"):
            ask_undo(control, "by_country")
        world.send(world.put("o-99", "NL", "7.00"))
        drain(keeper)
    assert world.rows("SELECT sum(orders), sum(amount) FROM by_country") == [(21, Decimal(117))]
    assert world.wrong() == []


def test_a_damaged_view_is_repaired_by_a_rebuild_and_require_equal_holds_it_back(
    world: World, control: Control
) -> None:
    begun(world)
    world.change_tables("UPDATE by_country__v1 SET n = n + 1 WHERE g0 = 'NL'")
    with closing(world.keeper()) as keeper:
        ask_rebuild(control, "by_country", require_equal=True)
        drain(keeper)
        assert world.rows(HOW) == [(1, "live", True), (2, "building", False)]
        row = control.versions("by_country")[1]
        assert "2 rows differ from version 1" in (row.waits_for or "")
        assert [each.version for each in cancel(control, "by_country")] == [2]
        # A number is never used twice.
        ask_rebuild(control, "by_country")
        drain(keeper)
        assert world.rows(HOW) == [(1, "kept", False), (3, "live", True)]
        assert holding(world) == []


def test_a_view_that_cannot_be_read_or_waits_does_not_end_the_proofs_of_others(
    world: World,
) -> None:
    begun(world)
    world.change_tables("ALTER TABLE large__v1 RENAME TO gone")
    world.app.view("more", sql="SELECT count(*) AS n FROM ordr")
    found = world.verify()
    assert {name: report.outcome for name, report in found.items()} == {
        "ordr_latest": "holds",
        "ordr_history": "holds",
        "by_country": "holds",
        "large": "differs",
        "more": "not compared",
    }
    assert any("large__v1" in said for said in found["large"].not_compared)
    assert "more has no version that readers see yet" in found["more"].not_compared[0]


def test_what_is_wrong_with_one_view_stops_no_other(
    world: World, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archive that cannot be read, and an error of PostgreSQL when a version is published."""
    begun(world)
    with closing(world.keeper()) as keeper:
        world.change_tables(
            "UPDATE position SET next_offset = next_offset - 1 WHERE view = 'large'"
        )
        with monkeypatch.context() as during:

            def damaged(*_: object) -> None:
                raise ArchiveError("the archive of ordr is damaged")

            during.setattr(keeper.trailer._reader, "sources", damaged)
            assert keeper.trailer.step() == 0
            assert "is damaged" in (control.versions("large")[0].error or "")
    world.app = changed_app(CHANGED)
    world.app.view("more", sql="SELECT count(*) AS n FROM ordr")
    point = ViewTables.point

    def refused(tables: ViewTables, plan: ViewPlan, version: int) -> None:
        if plan.name == "by_country":
            raise psycopg.errors.RaiseException("not by this trigger")
        point(tables, plan, version)

    with closing(world.keeper()) as keeper, monkeypatch.context() as during:
        during.setattr(ViewTables, "point", refused)
        drain(keeper)
        assert world.rows(HOW) == [(1, "live", True), (2, "building", False)]
        assert "not by this trigger" in (control.versions("by_country")[1].waits_for or "")
        assert [(row.published, row.why) for row in control.versions("more")] == [(True, None)]
        assert control.versions("large")[0].error is None


@pytest.mark.full
def test_the_history_is_rebuilt_too_and_latest_is_not(world: World, control: Control) -> None:
    begun(world)
    world.change_tables("DELETE FROM ordr_history__v1 WHERE key = 'o-3'")
    with closing(world.keeper()) as keeper:
        ask_rebuild(control, "ordr_history")
        drain(keeper)
        assert world.rows("SELECT count(*) FROM ordr_history") == [(30,)]
        assert holding(world) == []
    with pytest.raises(InvalidQuery):
        ask_rebuild(control, "ordr_latest")


def test_v6_a_version_is_built_by_one_process_at_a_time_and_again_after_a_kill(
    world: World, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old process may end while the new one begins; its duty ends with its connection."""
    begun(world)
    world.app = changed_app(CHANGED)
    real = build._run

    def killed(rows: Any, load: Any) -> None:
        real(rows, load)
        raise KeyboardInterrupt

    with closing(world.keeper()) as keeper:
        with control.duty("builds") as is_mine:
            assert is_mine
            assert keeper.builder.step() is None
            assert control.vector("by_country", 2) == {}
        with monkeypatch.context() as during:
            during.setattr(build, "_run", killed)
            with pytest.raises(KeyboardInterrupt):
                keeper.builder.step()
        assert world.rows("SELECT count(*) > 0 FROM by_country__v2") == [(True,)]
        drain(keeper)
        assert world.rows(HOW) == [(1, "kept", False), (2, "live", True)]
        groups = world.rows("SELECT country, orders, parts FROM by_country ORDER BY country")
        assert groups == [("BE", 10, 30), ("NL", 10, 20)]


def test_v13_readers_of_older_snapshots_and_dependents_hold_a_version_back(
    world: World, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(world)
    monkeypatch.setattr(trail, "_IN_THE_WAY_S", (0.0,))
    world.app = changed_app(CHANGED)
    schema = world.config.views.schema_name
    with closing(world.keeper()) as keeper, psycopg.connect(world.config.views_dsn) as reader:
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reader.execute("SET application_name = 'report'")
        reader.commit()
        before = reader.execute(
            f"SELECT sum(orders) FROM {schema}.large".replace("sum(orders)", "count(*)").encode()
        ).fetchone()
        drain(keeper)
        assert world.rows(HOW) == [(1, "live", True), (2, "building", False)]
        waits = control.versions("by_country")[1].waits_for or ""
        assert "waits for the transaction of report" in waits
        seen = reader.execute(f"SELECT count(*) FROM {schema}.by_country".encode()).fetchone()
        assert seen == (2,)
        assert before is not None
        reader.commit()
        world.change_tables("CREATE VIEW of_mine AS SELECT amount FROM by_country")
        drain(keeper)
        reason = control.versions("by_country")[1].waits_for or ""
        assert "everstate_views.of_mine depends on it" in reason
        world.change_tables("GRANT SELECT ON by_country TO PUBLIC; DROP VIEW of_mine")
        drain(keeper)
        assert world.rows(HOW) == [(1, "kept", False), (2, "live", True)]
        grants = "SELECT relacl::text LIKE '%=r/%' FROM pg_class WHERE relname = 'by_country'"
        assert world.rows(grants) == [(True,)]


@pytest.mark.full
def test_planted_a_version_published_under_an_older_snapshot_shows_that_reader_nothing(
    world: World, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(world)
    world.app = changed_app(CHANGED)
    monkeypatch.setattr(Control, "caught_up", lambda *_: None)
    schema = world.config.views.schema_name
    with closing(world.keeper()) as keeper, psycopg.connect(world.config.views_dsn) as reader:
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reader.execute(f"SELECT count(*) FROM {schema}.ordr_history".encode())
        drain(keeper)
        seen = reader.execute(f"SELECT count(*) FROM {schema}.by_country".encode()).fetchone()
        assert seen == (0,), "which no reader may ever see"


def test_a_view_that_is_not_declared_can_be_dropped(world: World, control: Control) -> None:
    begun(world)
    with pytest.raises(InvalidQuery, match="is still declared"):
        drop(control, "large")
    app = App("orders")
    app.entity("ordr", key="order_id")(Order)
    world.app = app
    with closing(world.keeper()) as keeper:
        drain(keeper)
        world.change_tables("CREATE VIEW of_mine AS SELECT * FROM large")
        with pytest.raises(PublishRefused):
            drop(control, "large")
        world.change_tables("DROP VIEW of_mine")
        drop(control, "large")
        assert world.rows(
            "SELECT to_regclass('large') IS NULL, to_regclass('large__v1') IS NULL"
        ) == [(True, True)]
        assert control.versions("large") == []


@pytest.mark.full
def test_recompute_asked_of_the_pipeline_names_what_differs_and_promotes_the_batch(
    world: World, control: Control
) -> None:
    """A verb asks through the control table; the answer has reports, and what is built again."""
    begun(world)
    world.archive()
    world.change_tables("UPDATE by_country__v1 SET n = n + 1 WHERE g0 = 'NL'")
    stop = threading.Event()
    answers = Answers(world.spark, world.config, world.app)
    serving = threading.Thread(target=answers.run, args=(stop,))
    serving.start()
    try:
        reports, promoted = prove(world.config, world.app, ["by_country", "large"], promote=True)
        with pytest.raises(EverstateError, match="nobody"):
            prove(world.config, world.app, ["nobody"])
    finally:
        stop.set()
        serving.join()
        answers.close()
    assert {report.name: report.outcome for report in reports} == {
        "by_country": "differs",
        "large": "holds",
    }
    assert promoted == ["by_country"]
    assert not control.is_on_duty("answers")
    assert world.rows("SELECT DISTINCT state FROM request ORDER BY 1") == [("done",), ("failed",)]
    with closing(world.keeper()) as keeper:
        drain(keeper)
    assert world.rows(HOW) == [(1, "kept", False), (2, "live", True)]
    assert holding(world) == []


def test_c15_where_the_archive_does_not_reach_back_a_view_is_born_from_latest(
    world: World, control: Control, tmp_path: Path
) -> None:
    begun(world)
    world.config = altered(world.config, archive={"path": str(tmp_path / "another")})
    world.forget(world.ends())
    world.send(world.put("o-99", "NL", "7.00"))
    world.archive()
    world.app = changed_app(CHANGED)
    with closing(world.keeper()) as keeper:
        drain(keeper)
        world.send(world.put("o-98", "NL", "7.00"))
        drain(keeper)
        ask_rebuild(control, "ordr_history")
        drain(keeper)
    assert world.rows(HOW) == [(1, "kept", False), (2, "live", True)]
    kept = "SELECT country, orders FROM by_country ORDER BY country"
    live = "SELECT country, count(*) FROM ordr GROUP BY country ORDER BY country"
    assert world.rows(kept) == world.rows(live)
    reason = control.versions("ordr_history")[1].error or ""
    assert "lacks the first changes of the log" in reason
    assert {report.outcome for report in world.proofs()} == {"not compared"}


def test_without_a_pipeline_a_verb_builds_by_itself(world: World, control: Control) -> None:
    begun(world)
    asked = ask_rebuild(control, "by_country")

    def is_done() -> bool:
        return any(
            r.published and r.version == asked.version for r in control.versions("by_country")
        )

    build_until(world.spark, world.config, world.app, HOME, is_done)
    assert world.rows(HOW) == [(1, "kept", False), (2, "live", True)]


@pytest.mark.full
def test_v3_a_view_that_nobody_declares_counts_no_more_after_a_while_and_is_built_again(
    world: World,
) -> None:
    begun(world)
    app = App("orders")
    app.entity("ordr", key="order_id")(Order)
    app.view("by_country", sql=orders_app().views["by_country"].sql)
    world.app, declared = app, world.app
    world.config = altered(world.config, views={"keep_old_hours": 0.0})
    with closing(world.keeper()) as keeper:
        world.send(world.put("o-99", "NL", "700.00"))
        drain(keeper)
    assert world.rows("SELECT count(*) FROM position WHERE view = 'large'") == [(0,)]
    assert world.rows("SELECT status, published FROM view WHERE name = 'large'") == [
        ("retired", True)
    ]
    world.app = declared
    with closing(world.keeper()) as keeper:
        drain(keeper)
        assert world.rows("SELECT version FROM view WHERE name = 'large' AND published") == [(2,)]
        assert holding(world) == []


class Wider(BaseModel):
    order_id: str
    country: str | None
    amount: Annotated[Decimal, Field(max_digits=12, decimal_places=2)]
    parts: int = 1
    note: str | None = None


@pytest.mark.full
def test_a_new_optional_field_builds_nothing_and_a_view_of_it_is_built(world: World) -> None:
    begun(world)
    app = App("orders")
    app.entity("ordr", key="order_id")(Wider)
    for name in ("by_country", "large"):
        app.view(name, sql=orders_app().views[name].sql)
    app.view("notes", sql="SELECT note, count(*) AS orders FROM ordr GROUP BY note")
    world.app = app
    world.__post_init__()
    with closing(world.keeper()) as keeper:
        drain(keeper)
        assert world.rows(HOW) == [(1, "live", True)]
        assert world.rows("SELECT note, orders FROM notes") == [(None, 20)]
        assert holding(world) == []
