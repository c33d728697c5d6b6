"""The proof of a derived topic compares values with all their digits."""

from __future__ import annotations

import pytest

from everstate.changes.derived import Derivation, notices_of, patch_of
from everstate.pipeline.derive.verify import _Judge

LONG = "12345678901234567890.12"
MESSAGE = (
    f'{{"id": "i", "kind": "updated", "provenance": {{"n": {LONG}}}, "version": 2,'
    f' "originalEntityState": {{"a": {LONG}1, "b": 1}},'
    f' "currentEntityState": {{"a": {LONG}2, "b": true}}}}'
)


def reason(derivation: Derivation, found: str, **planted: object) -> str | None:
    """What the proof says about this record of that change."""
    change = {"key": "k", "version": 2, "raw_key": b"k", "raw_value": MESSAGE, "batch": None}
    record = {
        "found": found,
        "found_key": b"k",
        "found_version": 2,
        "found_id": "i",
        "found_kind": "updated",
        "found_provenance": f'{{"n":{LONG}}}',
    }
    told = _Judge(derivation)._wrong({**change, **record, **planted})
    return None if told is None else told["reason"]


@pytest.mark.parametrize(
    ("a", "b", "wrong"),
    [(f"{LONG}2", "true", False), (f"{LONG}3", "true", True), (f"{LONG}2", "1", True)],
)
def test_a_record_with_another_digit_or_another_type_is_wrong(a: str, b: str, wrong: bool) -> None:
    patch = (
        f'[{{"op": "replace", "path": "/a", "value": {a}}},'
        f' {{"op": "replace", "path": "/b", "value": {b}}}]'
    )
    found = reason(Derivation("p", patch_of("sale")), patch)
    assert found == ("the patch is wrong" if wrong else None)
    notice = f'{{"key": "k", "old": {{"a": {LONG}1, "b": 1}}, "new": {{"a": {a}, "b": {b}}}}}'
    found = reason(Derivation("p", notices_of("sale")), notice)
    assert found == ("different" if wrong else None)


@pytest.mark.parametrize(
    ("planted", "wrong"),
    [
        ({}, None),
        ({"found_key": b"l"}, "another key"),
        ({"found_key": None}, "another key"),
        ({"found_version": 3}, "another version"),
        ({"found_id": "j"}, "of another change"),
        ({"found_id": None}, "of another change"),
        ({"found_kind": "deleted"}, "of another change"),
        ({"found_provenance": None}, "of another change"),
        ({"found_provenance": f'{{"n":{LONG}1}}'}, "of another change"),
    ],
)
def test_a_record_that_names_another_change_is_wrong(
    planted: dict[str, object], wrong: str | None
) -> None:
    patch = (
        f'[{{"op": "replace", "path": "/a", "value": {LONG}2}},'
        f' {{"op": "replace", "path": "/b", "value": true}}]'
    )
    assert reason(Derivation("p", patch_of("sale")), patch, **planted) == wrong
