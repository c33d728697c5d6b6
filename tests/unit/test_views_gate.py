"""The version gate decides what becomes of each change, without a store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from uuid import UUID

from everstate.views.control.verdicts import packed, unpacked
from everstate.views.gate import CONFLICT, GateRow, Keys, judge
from kit.view_orders import Logged, history, planned, state_of

STORY = history("a", [state_of("a", quantity=n) for n in range(6)])


def keys(*records: Logged) -> Keys:
    return Keys(planned(enumerate(records)))


def gate(version: int) -> dict[str, GateRow]:
    return {"a": GateRow(version, STORY[version - 1].change_id if version else None)}


def test_law_2_older_versions_are_asked_for_their_ids() -> None:
    def ids(asked: Iterable[tuple[str, int]]) -> Mapping[tuple[str, int], str]:
        assert set(asked) == {("a", 1), ("a", 2)}
        return {("a", 1): STORY[0].change_id, ("a", 2): str(UUID(int=9))}

    verdict = judge(keys(STORY[0], STORY[1]), gate(4), {}, ids)
    assert verdict.duplicates == [0]
    assert verdict.dead == [(1, CONFLICT)]


def test_a_held_change_survives_as_bytes() -> None:
    change = planned(enumerate(STORY)).slice(2, 1)
    assert unpacked(packed(change)).equals(change)
