"""When a version in another store is published, and from which position on."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from test_stores_elsewhere import NAME, Registry, Watched, version_of

from everstate.pipeline.keeping import elsewhere, publish
from everstate.pipeline.keeping.publish import ViewPublisher
from everstate.views import changing
from everstate.views.control import BUILDING, KEPT, LIVE, WAITING
from everstate.views.publishing import publish as publish_view
from everstate.views.stores.versioned import VersionedStore
from everstate.views.versions import Step
from kit.row_store_contract import AttemptingMemory

CONFIG: Any = None
PLAN: Any = None


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Watched:
    kept = Watched()
    kept.tables = {f"{NAME}__v{n}_0{n}": {} for n in (1, 2)}

    def store(_config: Any, _view: str, name: str, attempt: str = "") -> VersionedStore:
        return VersionedStore(name, AttemptingMemory(), kept, attempt)

    for module in (publish, elsewhere):
        monkeypatch.setattr(module, "versioned_store", store)
    return kept


def going_back(status: str) -> Any:
    """A registry with a version that was built when the core was at offset 3; now it is at 9."""
    control: Any = Registry(
        version_of(1, status, built={"core": {"0": 3}}), version_of(2, LIVE, published=True)
    )
    control.core_vector = lambda _entity: {0: 9}
    control.installing = nullcontext
    control.declared = lambda _row: None
    control.set_status = lambda name, n, status, *_why: control.record(name, n, status=status)
    return control


@pytest.mark.parametrize("is_emptied", [False, True])
@pytest.mark.parametrize("built", [None, {"vector": {}}])
def test_a_version_that_a_build_has_emptied_is_filled_and_does_not_catch_up(
    built: dict[str, Any] | None, *, is_emptied: bool
) -> None:
    """One that rode from the first change was never built, and has its rows, too."""
    control: Any = Registry(replace(version_of(1, KEPT), definition={}, built=built))
    control.emptied = {(NAME, 1)} if is_emptied else set()
    control.set_status = lambda *_given: None
    changing._catch_up(control, control.rows[0], {})
    assert control.rows[0].built == (None if is_emptied else built or {})


@pytest.mark.parametrize(("what", "status"), [("goes back", KEPT), ("changed", WAITING)])
def test_a_start_that_goes_back_lets_a_version_catch_up_to_the_core_of_that_moment(
    what: Any, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changing, "registered", lambda *_given, **_how: None)
    control = going_back(status)
    assert not changing.register_step(control, Step(what, NAME, "order", 1, 2), PLAN)
    assert control.rows[0].status == BUILDING
    assert control.rows[0].built == {"attempt": "01", "core": {"0": 9}}


def test_a_kept_version_that_is_asked_for_catches_up_to_the_core_of_that_moment() -> None:
    control = going_back(WAITING)
    changing.ask_rebuild(control, NAME, force=True)
    assert control.rows[0].built == {"attempt": "01", "core": {"0": 9}}
    assert control.rows[0].options == {"force": True, "require_equal": False}


def coming(core: int, seen: int, mine: int) -> Any:
    control: Any = Registry(version_of(1, LIVE, published=True), version_of(2, BUILDING))
    control.vectors = {("order_latest", 1): core, (NAME, 1): seen, (NAME, 2): mine}
    return control


def test_a_version_ahead_of_the_readers_is_published_however_far_the_core_is(
    rows: Watched,
) -> None:
    control = coming(core=30_000, seen=8_000, mine=9_000)
    assert publish_view(ViewPublisher(control, CONFIG), control.rows[1], PLAN)
    assert rows.names == {NAME: f"{NAME}__v2_02"}


def test_readers_see_no_version_in_turn_while_the_core_goes_on(
    rows: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store takes a while to show a version, and its readers saw none before."""
    control = coming(core=20_000, seen=0, mine=0)
    control.rows[0] = replace(control.rows[0], definition={"store": "another"})
    shown = list[str]()

    def tell(_view: str, name: str) -> None:
        shown.append(name)
        control.vectors["order_latest", 1] += 1_000

    monkeypatch.setattr(rows, "publish", tell)
    assert publish_view(ViewPublisher(control, CONFIG), control.rows[1], PLAN)
    assert set(shown) == {f"{NAME}__v2_02"}
    assert control.rows[1].published


@pytest.mark.parametrize("now", [{"error": "full"}, {"built": {"attempt": "0b"}}])
def test_a_version_that_failed_or_began_again_meanwhile_is_not_published(
    now: Any, rows: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = coming(core=7, seen=7, mine=7)
    tell = rows.publish

    def change(view: str, name: str) -> None:
        control.record(NAME, 2, **now)
        tell(view, name)

    monkeypatch.setattr(rows, "publish", change)
    assert not publish_view(ViewPublisher(control, CONFIG), control.rows[1], PLAN)
    assert rows.names == {NAME: f"{NAME}__v1_01"}


def test_why_a_version_in_another_store_is_not_published_yet_is_stored() -> None:
    control = coming(core=30_000, seen=9_500, mine=9_000)
    assert not publish_view(ViewPublisher(control, CONFIG), control.rows[1], PLAN)
    assert "readers' version" in (control.rows[1].waits_for or "")


def test_a_lost_connection_hides_no_error_of_a_publication(
    rows: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, given = coming(core=7, seen=7, mine=7), [True]
    control.closed = False

    def swapped(*_given: Any) -> bool:
        if given:
            return given.pop()
        control.closed = True
        control.versions = lambda *_name: pytest.fail("the connection is lost")
        raise ConnectionError("lost")

    control.swap_published = swapped
    with pytest.raises(ConnectionError, match="lost"):
        ViewPublisher(control, CONFIG).point(control.rows[0], control.rows[1], PLAN)
    assert rows.names == {NAME: f"{NAME}__v2_02"}  # told again each minute
