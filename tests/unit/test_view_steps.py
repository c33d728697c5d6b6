"""What a start of a project does with versions of views that are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from everstate.app import App
from everstate.changes.derived import Derivation, patch_of
from everstate.views.control import BUILDING, KEPT, LIVE, RETIRED, WAITING, ViewVersion
from everstate.views.kinds import ViewPlan
from everstate.views.versions import (
    OnChange,
    Step,
    declared_elsewhere,
    declared_views,
    registered,
    steps,
    to_come,
)
from kit.models import Guest


def hotel(entity: str = "guest", where: str = "") -> App:
    """A hotel with a view of one of its entity types."""
    app = App("hotel")
    app.entity("guest", key="guest_id")(Guest)
    app.entity("visitor", key="guest_id")(Guest)
    app.view("by_city", sql=f"SELECT city, count(*) AS n FROM {entity} {where} GROUP BY city")
    return app


def started(
    app: App,
    entity: str,
    stored: Sequence[ViewVersion],
    numbers: dict[str, int],
    on_change: OnChange = "rebuild",
) -> dict[str, Step]:
    found = steps(
        entity,
        declared_views(app, entity),
        stored,
        standing=[(row.name, row.version) for row in stored],
        numbers=numbers,
        elsewhere=declared_elsewhere(app, entity),
        on_change=on_change,
    )
    return {step.name: step for step in found}


def test_a_topic_that_is_declared_again_returns_from_its_position() -> None:
    topic = Derivation("guest_patches", patch_of("guest"))
    (step,) = steps(
        "guest",
        [cast("ViewPlan", topic)],
        [registered(cast("ViewPlan", topic), 1, status=RETIRED, published=True)],
        standing=[("guest_patches", 1)],
        numbers={"guest_patches": 1},
        on_change="rebuild",
    )
    assert (step.what, step.version) == ("returns", 1)


def test_a_view_that_moves_to_another_entity_type_keeps_its_rows_until_the_new_ones_are_there() -> (
    None
):
    kept = registered(hotel("guest").views["by_city"], 1, published=True)
    moved, numbers = hotel("visitor"), {"by_city": 1}
    assert "by_city" not in started(moved, "guest", [kept], numbers)
    step = started(moved, "visitor", [kept], numbers)["by_city"]
    assert (step.what, step.version, step.published, step.superseded) == ("changed", 2, 1, ())
    # The next start goes on with it, and one that moves it back gives it up.
    building = registered(moved.views["by_city"], 2, status=BUILDING)
    assert "by_city" not in started(moved, "guest", [kept, building], {"by_city": 2})
    step = started(moved, "visitor", [kept, building], {"by_city": 2})["by_city"]
    assert (step.what, step.version, step.published) == ("same", 2, 1)
    back = started(hotel("guest"), "guest", [kept, building], {"by_city": 2})["by_city"]
    assert (back.what, back.version, back.superseded) == ("same", 1, (2,))
    # When it was published meanwhile, the former version is there to go back to.
    older = replace(kept, published=False, status=KEPT)
    newer = replace(building, published=True, status=LIVE)
    back = started(hotel("guest"), "guest", [older, newer], {"by_city": 2})["by_city"]
    assert (back.what, back.version, back.published) == ("goes back", 1, 2)


def test_an_undo_stays_until_something_else_is_declared() -> None:
    """A start goes on with what an operator asked for, in progress or done."""
    older = registered(hotel().views["by_city"], 1, status=KEPT)
    app = hotel(where="WHERE city IS NOT NULL")
    newer = registered(app.views["by_city"], 2, published=True)
    goes_back = replace(older, status=BUILDING, undone=newer.fingerprint)
    step = started(app, "guest", [goes_back, newer], {"by_city": 2})["by_city"]
    assert (step.what, step.version, step.superseded) == ("same", 1, ())
    done = replace(goes_back, published=True, status=LIVE)
    left = replace(newer, published=False, status=KEPT)
    for on_change in ("rebuild", "ask"):
        step = started(app, "guest", [done, left], {"by_city": 2}, on_change)["by_city"]
        assert (step.what, step.version, step.superseded) == ("same", 1, ())
    # On the way forward again, a start leaves that, too.
    forward = replace(left, status=BUILDING)
    step = started(app, "guest", [done, forward], {"by_city": 2})["by_city"]
    assert (step.what, step.superseded) == ("same", ())
    # So does a repair of what was gone back to, when the way forward was dropped.
    repair = replace(older, version=3, status=BUILDING)
    step = started(app, "guest", [done, repair], {"by_city": 3})["by_city"]
    assert (step.what, step.version, step.superseded) == ("same", 1, ())
    other = hotel(where="WHERE city = 'Wien'")
    step = started(other, "guest", [done, left], {"by_city": 2})["by_city"]
    assert (step.what, step.version) == ("changed", 3)
    # The declaration follows the undo: there is nothing to do, either.
    assert started(hotel(), "guest", [done, left], {"by_city": 2})["by_city"].what == "same"


def test_what_an_undo_undoes_is_what_the_app_declares_though_readers_never_saw_it() -> None:
    """Else the next start of the same app would build it again, and give up the undo."""
    app = hotel(where="WHERE city IS NOT NULL")
    older = registered(hotel().views["by_city"], 1, status=KEPT)
    repaired = replace(older, version=2, published=True, status=LIVE)
    repair = replace(older, version=3, status=BUILDING)
    changed = registered(app.views["by_city"], 4, status=BUILDING)
    assert to_come([older, repaired]) is None
    assert to_come([older, repaired, repair]) is None
    assert to_come([older, repaired, repair, changed]) is changed
    waits = replace(changed, version=5, status=WAITING)
    assert to_come([older, repaired, waits]) is waits
    goes_back = replace(older, status=BUILDING, undone=changed.fingerprint)
    for on_change in ("rebuild", "ask"):
        rows = [goes_back, repaired, waits]
        step = started(app, "guest", rows, {"by_city": 5}, on_change)["by_city"]
        assert (step.what, step.version, step.superseded) == ("same", 1, ())


def test_a_rebuild_that_was_asked_for_or_is_half_done_stays_until_something_else_is_declared() -> (
    None
):
    """A start is no reason to forget it: the published version may be damaged."""
    app = hotel()
    seen = registered(app.views["by_city"], 1, published=True)
    asked = registered(app.views["by_city"], 2, status=BUILDING)
    half = replace(asked, built={"vector": {"1/0": 7}})
    left = replace(seen, status=RETIRED)
    for on_change in ("rebuild", "ask"):
        for rows, what in (
            ([seen, asked], "same"),
            ([seen, half], "same"),
            ([left, asked], "returns"),
        ):
            step = started(app, "guest", rows, {"by_city": 2}, on_change)["by_city"]
            assert (step.what, step.version, step.superseded) == (what, 1, ())
    # The same meaning in another text goes on with it, another meaning does not.
    commented = replace(seen, definition={"sql": "-- of before"})
    step = started(app, "guest", [commented, asked], {"by_city": 2})["by_city"]
    assert (step.what, step.superseded) == ("text", ())
    changed = hotel(where="WHERE city IS NOT NULL")
    step = started(changed, "guest", [seen, asked], {"by_city": 2})["by_city"]
    assert (step.what, step.version, step.superseded) == ("changed", 3, (2,))


def test_with_ask_a_start_does_not_go_back_by_itself() -> None:
    older = registered(hotel().views["by_city"], 1, status=KEPT)
    newer = registered(hotel(where="WHERE city IS NOT NULL").views["by_city"], 2, published=True)
    step = started(hotel(), "guest", [older, newer], {"by_city": 2}, "ask")["by_city"]
    assert (step.what, step.version) == ("asked", 1)
    step = started(hotel(), "guest", [older, newer], {"by_city": 2})["by_city"]
    assert (step.what, step.version) == ("goes back", 1)
