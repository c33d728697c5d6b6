"""`views rebuild --require-equal`: both versions are at one position when they are compared."""

from __future__ import annotations

from contextlib import closing

import pyarrow as pa
import pytest
from keep_cases import HOW, World, begun, drain

from everstate.pipeline.keeping import trail
from everstate.pipeline.keeping.keep import Keeper
from everstate.pipeline.keeping.kept import KeptView
from everstate.views.changing import ask_rebuild
from everstate.views.control import Control

DIFFERENT = "SELECT version, status, built->>'different' FROM view WHERE name = '{}' ORDER BY 1"


@pytest.mark.full
def test_a_version_waits_for_the_one_that_readers_see_before_they_are_compared(
    world: World, control: Control
) -> None:
    begun(world)
    world.change_tables("ALTER TABLE by_country__v1 ADD CONSTRAINT low CHECK (g0 <> 'FR')")
    world.send(world.put("o-99", "FR", "7.00"))
    with closing(world.keeper()) as keeper:
        drain(keeper)
        ask_rebuild(control, "by_country", require_equal=True)
        drain(keeper)
        assert world.rows(HOW) == [(1, "live", True), (2, "building", False)]
        row = control.versions("by_country")[1]
        assert "waits for version 1, to compare the rows at one position" in (row.waits_for or "")
    world.change_tables("ALTER TABLE by_country__v1 DROP CONSTRAINT low")
    with closing(world.keeper()) as keeper:
        drain(keeper)
    found = world.rows(DIFFERENT.format("by_country"))
    assert found == [(1, "kept", None), (2, "live", "0")]


def parts_of(changes: pa.Table) -> pa.Table:
    """How many parts each order has."""
    last = {row["key"]: row["current"] for row in changes.to_pylist()}
    rows = [{"key": key, "parts": now["parts"]} for key, now in last.items() if now is not None]
    return pa.Table.from_pylist(rows, schema=pa.schema([("key", pa.string()), *COLUMNS]))


COLUMNS = (pa.field("parts", pa.int64()),)


@pytest.mark.full
def test_the_version_that_readers_see_comes_along_when_neither_rides(
    world: World, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.app.python_view("parts_of", of="ordr", columns=COLUMNS)(parts_of)
    begun(world)
    real, sent = trail.Trailer._meet, list[str]()

    def meet(trailer: trail.Trailer, control: Control, view: KeptView) -> int:
        """The core goes on, once, after the version that readers see had caught up."""
        if not sent:
            sent.append("o-99")
            world.send(world.put("o-99", "FR", "7.00", parts=3))
            Keeper.step(keeper)
        return real(trailer, control, view)

    with closing(world.keeper()) as keeper:
        drain(keeper)
        ask_rebuild(control, "parts_of", require_equal=True)
        world.send(world.put("o-98", "FR", "7.00", parts=2))
        monkeypatch.setattr(trail.Trailer, "_meet", meet)
        drain(keeper)
    assert sent == ["o-99"]
    assert world.rows(DIFFERENT.format("parts_of")) == [(1, "kept", None), (2, "live", "0")]
    assert all(report.holds for report in world.verify().values())
