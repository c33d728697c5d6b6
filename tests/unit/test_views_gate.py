"""The version gate decides what becomes of each change, without a store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from uuid import UUID

import pyarrow as pa

from everstate.views.batch import Batch
from everstate.views.control.verdicts import packed, unpacked
from everstate.views.gate import CONFLICT, GateRow, HeldRow, Keys, judge
from everstate.views.sums import sum_deltas
from everstate.views.tables import SumTable, planned_column
from kit.view_orders import START, Logged, history, planned, state_of

STORY = history("a", [state_of("a", quantity=n) for n in range(6)])


def keys(*records: Logged) -> Keys:
    return Keys(planned(enumerate(records)))


def unknown(_: Iterable[tuple[str, int]]) -> Mapping[tuple[str, int], str]:
    return {}


def gate(version: int) -> dict[str, GateRow]:
    return {"a": GateRow(version, STORY[version - 1].change_id if version else None)}


def test_keys_whose_versions_run_on_are_dense() -> None:
    b = history("b", [state_of("b")] * 3)
    found = keys(STORY[0], b[0], STORY[1], b[2], STORY[2])
    assert dict(zip(found.names.to_pylist(), found.dense().tolist(), strict=True)) == {
        "a": True,
        "b": False,
    }
    assert found.lasts.tolist() == [4, 3]


def test_without_gates_to_look_at_everything_applies() -> None:
    verdict = judge(keys(*STORY), {}, {}, unknown)
    assert verdict.apply.all()
    assert verdict.ordinary


def test_law_2_same_version_and_id_is_a_duplicate_another_id_a_conflict() -> None:
    other = Logged(**{**vars(STORY[1]), "change_id": str(UUID(int=7))})
    verdict = judge(keys(STORY[1], other, STORY[2]), gate(2), {}, unknown)
    assert verdict.apply.tolist() == [False, False, True]
    assert verdict.duplicates == [0]
    assert verdict.dead == [(1, CONFLICT)]


def test_law_2_older_versions_are_asked_for_their_ids() -> None:
    def ids(asked: Iterable[tuple[str, int]]) -> Mapping[tuple[str, int], str]:
        assert set(asked) == {("a", 1), ("a", 2)}
        return {("a", 1): STORY[0].change_id, ("a", 2): str(UUID(int=9))}

    verdict = judge(keys(STORY[0], STORY[1]), gate(4), {}, ids)
    assert verdict.duplicates == [0]
    assert verdict.dead == [(1, CONFLICT)]


def test_c14_changes_beyond_a_gap_wait_and_are_released_in_order() -> None:
    held = {"a": {4: HeldRow(STORY[3].change_id, planned([(9, STORY[3])]))}}
    verdict = judge(keys(STORY[4], STORY[1], STORY[2]), gate(1), held, unknown)
    assert verdict.apply.all()
    assert [(f.key, f.version, f.by) for f in verdict.released] == [("a", 4, 2)]
    assert verdict.waited == [(0, 2)]
    assert verdict.hold == []
    verdict = judge(keys(STORY[4], STORY[2]), gate(1), {}, unknown)
    assert verdict.hold == [0, 1]


def test_as_of_is_the_running_maximum_of_a_keys_times() -> None:
    late = history("a", [state_of("a")] * 3, [5, 2, 7])
    other = history("b", [state_of("b")] * 2, [1, 3])
    batch = Batch(
        planned(enumerate([late[0], other[0], late[1], other[1], late[2]])),
        {"b": START + timedelta(hours=2)},
    )
    hours = [(moment - START) / timedelta(hours=1) for moment in batch.as_of.to_pylist()]
    assert hours == [5, 2, 5, 3, 7]


def test_a_held_change_survives_as_bytes() -> None:
    change = planned(enumerate(STORY)).slice(2, 1)
    assert unpacked(packed(change)).equals(change)


def test_c16_sums_that_do_not_fit_64_bits_are_exact() -> None:
    table = SumTable("v", 1, "", (), (("n", "count"), ("a0", "sum")))
    images = pa.array([{"a0": 2**62}] * 6)
    nothing = pa.nulls(6, images.type)
    deltas = sum_deltas(
        table,
        pa.table(
            {planned_column(table, "original"): nothing, planned_column(table, "current"): images}
        ),
    )
    assert deltas.to_pylist() == [{"n": 6, "a0": 6 * 2**62}]


def test_changes_that_cancel_out_write_nothing() -> None:
    table = SumTable("v", 1, "", ("g0",), (("n", "count"), ("a0", "sum")))
    images = pa.array([{"g0": None, "a0": 5}, None, {"g0": "x", "a0": 1}])
    deltas = sum_deltas(
        table,
        pa.table(
            {planned_column(table, "original"): images, planned_column(table, "current"): images}
        ),
    )
    assert deltas.num_rows == 0
