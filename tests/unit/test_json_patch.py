"""JSON Patches of two documents: exact for arbitrary JSON, judged by another implementation."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any, Final

import jsonpatch
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstate.changes.json_patch import json_patch


def _step(op: str, path: str, **more: Any) -> dict[str, Any]:
    return {"op": op, "path": path, **more}


_WALDO = {"foo": {"bar": "baz", "waldo": "fred"}, "qux": {"corge": "grault"}}
_MOVED = {"foo": {"bar": "baz"}, "qux": {"corge": "grault", "thud": "fred"}}
_GRASS = {"foo": ["all", "grass", "cows", "eat"]}
_TESTED = {"baz": "qux", "foo": ["a", 2, "c"]}

# Documents and patches of RFC 6902, appendix A, and the cases beside them that its rules imply.
CASES: Final[list[tuple[Any, list[dict[str, Any]], Any]]] = [
    # A.1 to A.10
    ({"foo": "bar"}, [_step("add", "/baz", value="qux")], {"baz": "qux", "foo": "bar"}),
    (
        {"foo": ["bar", "baz"]},
        [_step("add", "/foo/1", value="qux")],
        {"foo": ["bar", "qux", "baz"]},
    ),
    ({"baz": "qux", "foo": "bar"}, [_step("remove", "/baz")], {"foo": "bar"}),
    ({"foo": ["bar", "qux", "baz"]}, [_step("remove", "/foo/1")], {"foo": ["bar", "baz"]}),
    (
        {"baz": "qux", "foo": "bar"},
        [_step("replace", "/baz", value="boo")],
        {"baz": "boo", "foo": "bar"},
    ),
    (_WALDO, [{"op": "move", "from": "/foo/waldo", "path": "/qux/thud"}], _MOVED),
    (
        _GRASS,
        [{"op": "move", "from": "/foo/1", "path": "/foo/3"}],
        {"foo": ["all", "cows", "eat", "grass"]},
    ),
    (
        _TESTED,
        [_step("test", "/baz", value="qux"), _step("test", "/foo/1", value=2)],
        _TESTED,
    ),
    (
        {"foo": "bar"},
        [_step("add", "/child", value={"grandchild": {}})],
        {"foo": "bar", "child": {"grandchild": {}}},
    ),
    # A.11: unrecognised members are ignored; A.14 to A.16
    ({"foo": "bar"}, [_step("add", "/baz", value="qux", xyz=123)], {"foo": "bar", "baz": "qux"}),
    ({"/": 9, "~1": 10}, [_step("test", "/~01", value=10)], {"/": 9, "~1": 10}),
    ({"foo": ["bar"]}, [_step("add", "/foo/-", value=["abc", "def"])],
     {"foo": ["bar", ["abc", "def"]]}),
    # The document itself, null against missing, empty names, arrays at the top.
    ({"foo": "bar"}, [_step("replace", "", value={"baz": "qux"})], {"baz": "qux"}),
    ({"foo": "bar"}, [_step("add", "", value=[])], []),
    (None, [_step("replace", "", value={"foo": None})], {"foo": None}),
    ({"foo": 1}, [_step("replace", "", value=None)], None),
    ({"foo": None}, [_step("replace", "/foo", value="truthy")], {"foo": "truthy"}),
    ({"foo": None}, [_step("remove", "/foo")], {}),
    ({"foo": "bar"}, [_step("replace", "/foo", value=None)], {"foo": None}),
    ({}, [_step("add", "/", value=1)], {"": 1}),
    ([], [_step("add", "/0", value="foo")], ["foo"]),
    (["foo", "sil"], [_step("add", "/1", value=["bar", "baz"])], ["foo", ["bar", "baz"], "sil"]),
    ([1, 2, 3, 4], [_step("remove", "/0")], [2, 3, 4]),
    ({"foo": [1, 2, 3, 4]}, [_step("remove", "/foo/3")], {"foo": [1, 2, 3]}),
    ([{"foo": 1}, {"foo": 2}], [_step("replace", "/1/foo", value=[3])], [{"foo": 1}, {"foo": [3]}]),
    (
        {"foo": {"foo": {"bar": True}}},
        [{"op": "copy", "from": "/foo/foo/bar", "path": "/foo/bar"}],
        {"foo": {"foo": {"bar": True}, "bar": True}},
    ),
]  # fmt: skip


NAMES = st.text(max_size=4) | st.sampled_from(
    ["", "/", "~", "~1", "a/b", "m~n", '"', "\\", "é", "0"]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, 1, "", "1", "true", "null", "\u2028", "😀"])
    | st.text(max_size=6)
    | st.decimals(allow_nan=False, allow_infinity=False, places=12)
)
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=25,
)


def text(value: Any) -> bytes:
    """JSON whose numbers have all their digits."""
    if isinstance(value, dict):
        return b"{%b}" % b",".join(
            b"%b:%b" % (text(name), text(part)) for name, part in value.items()
        )
    if isinstance(value, list):
        return b"[%b]" % b",".join(map(text, value))
    if isinstance(value, Decimal):
        return format(value, "f").encode()
    return json.dumps(value, ensure_ascii=len(str(value)) % 2 == 0).encode()


def read(document: bytes) -> Any:
    return json.loads(document, parse_float=Decimal)


def exactly(value: Any) -> Any:
    """What tells `1` from `true` and from `1.0`, and not one order of members from another."""
    if isinstance(value, dict):
        return {name: exactly(part) for name, part in value.items()}
    if isinstance(value, list):
        return [exactly(part) for part in value]
    return type(value), str(value)


def applied(original: Any, patch: bytes) -> Any:
    # The library compares numbers by value, and applies operations to what it is given.
    return jsonpatch.JsonPatch(read(patch)).apply(original)


def edited(draw: Any, value: Any) -> Any:
    """A document that has most of another: members go, come, change and change their type."""
    if isinstance(value, dict):
        kept = {name: edited(draw, part) for name, part in value.items() if draw(st.integers(0, 4))}
        return kept | draw(st.dictionaries(NAMES, SCALARS, max_size=1))
    if isinstance(value, list):
        kept_parts = [edited(draw, part) for part in value if draw(st.integers(0, 4))]
        place = draw(st.integers(0, len(kept_parts)))
        return kept_parts[:place] + draw(st.lists(SCALARS, max_size=2)) + kept_parts[place:]
    return draw(DOCUMENTS) if not draw(st.integers(0, 3)) else value


@st.composite
def pairs(draw: Any) -> tuple[Any, Any]:
    original = draw(DOCUMENTS)
    return original, edited(draw, original) if draw(st.booleans()) else draw(DOCUMENTS)


@given(pairs())
@settings(max_examples=400, deadline=None)
def test_applied_to_the_original_a_patch_gives_exactly_the_current_document(
    pair: tuple[Any, Any],
) -> None:
    original, current = map(text, pair)
    patch = json_patch(original, current)
    assert exactly(applied(read(original), patch)) == exactly(read(current))
    assert (
        (patch == b"[]")
        or exactly(read(original)) != exactly(read(current))
        or b"\\u" in (original + current)
    )
    whole = [step for step in read(patch) if step["path"] == ""]
    same_type = original[:1] == current[:1] and original[:1] in (b"{", b"[")
    assert not whole or not same_type, "the root is replaced only when its type changes"


@given(DOCUMENTS)
@settings(max_examples=100, deadline=None)
def test_equal_documents_have_an_empty_patch_whatever_the_order_of_their_members(
    document: Any,
) -> None:
    turned = dict(reversed(document.items())) if isinstance(document, dict) else document
    assert json_patch(text(document), text(turned)) == b"[]"


@pytest.mark.parametrize(("document", "patch", "expected"), CASES)
def test_the_rfcs_own_cases(document: Any, patch: list[Any], expected: Any) -> None:
    """Their documents, patched by us; their patches show that the judge knows the RFC."""
    assert exactly(jsonpatch.JsonPatch(patch).apply(read(text(document)))) == exactly(expected)
    ours = json_patch(text(document), text(expected))
    assert exactly(applied(read(text(document)), ours)) == exactly(read(text(expected)))


@pytest.mark.parametrize(
    ("original", "current", "steps"),
    [
        ('{"a":1,"b":{"c":2}}', '{"a":1,"b":{"c":3}}', ["replace /b/c"]),
        ('{"a":null}', "{}", ["remove /a"]),
        ("{}", '{"a":null}', ["add /a"]),
        ('{"a":1}', '{"a":"1"}', ["replace /a"]),
        ('{"a":[1]}', '{"a":{"0":1}}', ["replace /a"]),
        ('{"a/b":1,"m~n":1}', '{"a/b":2,"m~n":2}', ["replace /a~1b", "replace /m~0n"]),
        ('{"l":["aaaaaaaaaaaa","cccccccccccc","dddddddddddd"]}',
         '{"l":["aaaaaaaaaaaa","b","cccccccccccc","dddddddddddd"]}', ["add /l/1"]),
        ('{"l":["a","b","c"]}',
         '{"l":["a"]}', ["replace /l"]),
        ("null", '{"a":1}', ["replace "]),
        ('{"a":1}', "null", ["replace "]),
        ("[1,2]", "[3,4]", ["replace /0", "replace /1"]),
        ('{"n":1.10}', '{"n":1.1}', ["replace /n"]),
    ],
)  # fmt: skip
def test_a_patch_says_what_changed_member_by_member(
    original: str, current: str, steps: list[str]
) -> None:
    patch = read(json_patch(original.encode(), current.encode()))
    assert [f"{step['op']} {step['path']}" for step in patch] == steps


def test_numbers_keep_their_text() -> None:
    patch = json_patch(b'{"n":1}', b'{"n":0.12345678901234567890123456789}')
    assert patch == b'[{"op":"replace","path":"/n","value":0.12345678901234567890123456789}]'


def test_what_is_nested_very_deep_is_replaced_whole_there() -> None:
    deep = [b'{"a":' * 150 + number + b"}" * 150 for number in (b"1", b"2")]
    patch = json_patch(*deep)
    assert exactly(applied(read(deep[0]), patch)) == exactly(read(deep[1]))
    assert read(patch)[0]["path"].count("/") == 101


def test_planted_a_member_that_becomes_null_and_one_that_goes_are_told_apart() -> None:
    """A diff that takes a missing member for null would pass every other document."""
    for original, current in ((b'{"a":1}', b'{"a":null}'), (b'{"a":null}', b'{"a":1}')):
        patch = json_patch(original, current)
        taken_for_missing = patch.replace(b"replace", b"remove").replace(b',"value":null', b"")
        if b"null" in current:
            assert exactly(applied(read(original), taken_for_missing)) != exactly(read(current))


def test_a_patch_is_never_much_longer_than_both_documents() -> None:
    """A topic takes a message with both: it must take the patch, too."""
    old, new = ({f"m{n}": n + by for n in range(20_000)} for by in (0, 1))
    patch = json_patch(text(old), text(new))
    assert len(patch) < len(text(old)) + len(text(new))
    assert applied(old, patch) == new
