"""Documents and patches of RFC 6902, appendix A, and the cases beside them that its rules imply."""

from __future__ import annotations

from typing import Any, Final


def _step(op: str, path: str, **more: Any) -> dict[str, Any]:
    return {"op": op, "path": path, **more}


_WALDO = {"foo": {"bar": "baz", "waldo": "fred"}, "qux": {"corge": "grault"}}
_MOVED = {"foo": {"bar": "baz"}, "qux": {"corge": "grault", "thud": "fred"}}
_GRASS = {"foo": ["all", "grass", "cows", "eat"]}
_TESTED = {"baz": "qux", "foo": ["a", 2, "c"]}

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
