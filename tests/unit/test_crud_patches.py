"""Merge patches and JSON patches, and what is wrong with them."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, RootModel, computed_field

from everstate.changes import EntityType
from everstate.changes.fields import tree_of
from everstate.changes.json_numbers import decode, encode
from everstate.errors import InvalidBody
from everstate.sources.crud.bodies import read_entity
from everstate.sources.crud.patches import (
    JSON_PATCH,
    MERGE_PATCH,
    apply_json_patch,
    check_patch,
    merge,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


LIMIT = 1_000_000


def applied(document: Any, operations: Any) -> Any:
    check_patch("guest", JSON_PATCH, operations)
    return apply_json_patch("guest", document, operations, copied_bytes_max=LIMIT)


@pytest.mark.parametrize("patch", [None, 3, [], "a"])
def test_a_merge_patch_of_an_entity_is_an_object(patch: Any) -> None:
    with pytest.raises(InvalidBody):
        check_patch("guest", MERGE_PATCH, patch)
    check_patch("guest", MERGE_PATCH, {})


@pytest.mark.parametrize(
    ("target", "patch", "merged"),
    [
        # The table of RFC 7396, appendix A.
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, None, None),
        ({"a": "foo"}, "bar", "bar"),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_a_merge_patch_does_what_its_rfc_says(target: Any, patch: Any, merged: Any) -> None:
    assert merge(target, patch) == merged


@given(target=JSON, patch=JSON)
def test_a_merge_patch_twice_is_the_same_as_once(target: Any, patch: Any) -> None:
    once = merge(target, patch)
    assert merge(once, patch) == once


class Bed(BaseModel):
    """A part of a room."""

    number: int = 1
    cover: str | None = "wool"


class Room(BaseModel):
    """What is patched."""

    room_id: str
    when: int | None = 5
    size: int = 20
    bed: Bed | None = None
    beds: dict[str, Bed] | None = None
    prices: dict[str, int | None] = {}
    shade: RootModel[int | None] = RootModel[int | None](1)
    kind: str | None = Field(default="single", alias="roomKind")

    @computed_field
    def name(self) -> str:
        return f"room {self.room_id}"


class Keeping(Room):
    """It keeps what it does not know."""

    model_config = ConfigDict(extra="allow")


ROOM = EntityType("room", Room, "room_id")
STATE: dict[str, Any] = {
    "room_id": "r",
    "when": 7,
    "size": 30,
    "bed": {"number": 2, "cover": "silk"},
    "beds": {"a": {"number": 3, "cover": "silk"}, "b": {"number": 4, "cover": "silk"}},
    "prices": {"low": 1, "high": 2},
    "shade": 3,
    "roomKind": "double",
    "name": "room r",
}


def patched(patch: Any) -> dict[str, Any]:
    merged = merge(STATE, patch, tree_of(Room))
    state: dict[str, Any] = decode(ROOM.encode(read_entity(ROOM, encode(merged))))
    return {name: value for name, value in state.items() if value != STATE[name]}


@pytest.mark.parametrize(
    ("patch", "changed"),
    [
        ({"when": None}, {"when": None}),
        ({"size": None}, {"size": 20}),
        ({"bed": None}, {"bed": None}),
        ({"bed": {"cover": None}}, {"bed": {"number": 2, "cover": None}}),
        ({"bed": {"number": None}}, {"bed": {"number": 1, "cover": "silk"}}),
        (
            {"beds": {"a": None, "b": {"cover": None}}},
            {"beds": {"b": {"number": 4, "cover": None}}},
        ),
        ({"prices": {"low": None}}, {"prices": {"high": 2}}),
        ({"shade": None}, {"shade": None}),
        ({"roomKind": None}, {"roomKind": None}),
        ({"name": None}, {}),
    ],
)
def test_null_is_written_where_a_field_takes_it_and_removes_elsewhere(
    patch: Any, changed: dict[str, Any]
) -> None:
    assert patched(patch) == changed


@pytest.mark.parametrize(
    ("patch", "where"),
    [
        ({"whem": None}, "whem"),
        ({"kind": None}, "kind"),
        ({"bed": {"covr": None}}, "bed.covr"),
        ({"beds": {"a": {"covr": None}}}, "beds.a.covr"),
        ({"room_id": None}, "room_id"),
    ],
)
def test_a_name_that_no_field_has_is_refused_also_with_null(patch: Any, where: str) -> None:
    with pytest.raises(InvalidBody) as refused:
        patched(patch)
    assert refused.value.problems[0][0] == where


def test_null_removes_a_field_that_the_model_does_not_have_but_keeps() -> None:
    assert merge({**STATE, "more": 1}, {"more": None}, tree_of(Keeping)) == STATE


def test_a_json_patch_is_applied_in_order() -> None:
    document = {"name": "Eva", "tags": ["a"]}
    operations = [
        {"op": "test", "path": "/name", "value": "Eva"},
        {"op": "add", "path": "/tags/-", "value": "b"},
        {"op": "copy", "from": "/name", "path": "/nick"},
        {"op": "move", "from": "/tags/0", "path": "/first"},
        {"op": "replace", "path": "/name", "value": None},
        {"op": "remove", "path": "/nick"},
    ]
    assert applied(document, operations) == {
        "name": None,
        "tags": ["b"],
        "first": "a",
    }


def test_a_patch_that_is_applied_again_to_a_later_state_does_the_same() -> None:
    """A lost race applies the patch to the next state: no operation may have been changed."""
    operations = [
        {"op": "add", "path": "/tags", "value": ["a"]},
        {"op": "add", "path": "/tags/-", "value": "b"},
    ]
    assert applied({}, operations) == applied({}, operations) == {"tags": ["a", "b"]}


def test_a_member_may_have_the_name_of_the_element_after_the_last_one() -> None:
    operations = [
        {"op": "test", "path": "/-", "value": 1},
        {"op": "copy", "from": "/-", "path": "/a"},
        {"op": "remove", "path": "/-"},
    ]
    assert applied({"-": 1}, operations) == {"a": 1}


def test_copies_are_bounded_by_the_bytes_that_they_make() -> None:
    """40 kB of copies made 650 MB of a state of 650 kB."""
    operations = [{"op": "copy", "from": "/a", "path": "/l/-"}] * 1_000
    with pytest.raises(InvalidBody, match="copies more than 1,000,000 bytes") as refusal:
        applied({"a": "x" * 650_000, "l": []}, operations)
    assert refusal.value.problems[0][0] == "patch.1"
    assert len(applied({"a": "x" * 900, "l": []}, operations)["l"]) == 1_000


def test_the_document_is_not_copied_for_each_operation() -> None:
    """1,000 tests of a state of 400 kB held a thread for 19 s."""
    lines = [{"article": "tea", "quantity": 1, "price": "2.50"} for _ in range(8_000)]
    operations = [
        {"op": "test", "path": f"/items/{at}/article", "value": "tea"} for at in range(1_000)
    ]
    begun = time.thread_time()
    applied({"items": lines}, operations)
    assert time.thread_time() - begun < 2


def test_the_reason_of_a_refusal_does_not_quote_a_whole_document() -> None:
    with pytest.raises(InvalidBody) as refusal:
        applied({"a": "x" * 100_000}, [{"op": "test", "path": "/a", "value": "y" * 100_000}])
    assert len(refusal.value.problems[0][1]) <= 200


@pytest.mark.parametrize(
    ("operations", "field"),
    [
        ({"op": "add"}, "patch"),
        (["add"], "patch.0"),
        ([{"op": "grow", "path": ""}], "patch.0"),
        ([{"op": "add", "path": "/a"}], "patch.0.value"),
        ([{"op": "add", "path": 3, "value": 1}], "patch.0.path"),
        ([{"op": "add", "path": "a", "value": 1}], "patch.0.path"),
        ([{"op": "move", "path": "/a"}], "patch.0.from"),
        ([{"op": "remove", "path": "/none"}], "patch.0"),
        ([{"op": "test", "path": "/a", "value": 2}], "patch.0"),
        ([{"op": "add", "path": "/a/b/c", "value": 2}], "patch.0"),
        ([{"op": "add", "path": "/l/7", "value": 2}], "patch.0"),
        ([{"op": "add", "path": "/l/x", "value": 2}], "patch.0"),
        ([{"op": "add", "path": "/~2", "value": 2}], "patch.0"),
        ([{"op": "move", "from": "/l", "path": "/l/0"}], "patch.0"),
        ([{"op": "copy", "from": "", "path": "/l/-"}] * 40, "patch."),
        # `-` is the element after the last one, which there is not (RFC 6901).
        ([{"op": "copy", "from": "/l/-", "path": "/b"}], "patch.0"),
        ([{"op": "copy", "from": "/l/-/a", "path": "/b"}], "patch.0"),
        ([{"op": "move", "from": "/l/-", "path": "/b"}], "patch.0"),
        ([{"op": "move", "from": "/l/-", "path": "/l/-"}], "patch.0"),
        ([{"op": "remove", "path": "/l/-"}], "patch.0"),
        ([{"op": "replace", "path": "/l/-", "value": 1}], "patch.0"),
        ([{"op": "test", "path": "/l/-", "value": None}], "patch.0"),
        ([{"op": "test", "path": "/a", "value": 1}] * 1_001, "patch"),
    ],
)
def test_a_json_patch_that_cannot_be_applied_names_its_operation(
    operations: Any, field: str
) -> None:
    with pytest.raises(InvalidBody) as refusal:
        applied({"a": 1, "l": [1]}, operations)
    assert refusal.value.problems[0][0].startswith(field)


@given(
    operations=st.lists(
        st.fixed_dictionaries(
            {
                "op": st.sampled_from(["add", "remove", "replace", "move", "copy", "test"]),
                "path": st.text(alphabet="/al01-~", max_size=6),
            },
            optional={"value": JSON, "from": st.text(alphabet="/al01-~", max_size=6)},
        ),
        max_size=4,
    )
)
def test_a_json_patch_is_applied_or_refused_and_nothing_else(operations: Any) -> None:
    with suppress(InvalidBody):
        applied({"a": {"l": 1}, "l": [1, {"a": 2}]}, operations)
