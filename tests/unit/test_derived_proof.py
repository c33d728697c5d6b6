"""The proof of a derived topic compares values with all their digits."""

from __future__ import annotations

import pytest

from everstate.changes.derived import Derivation, notices_of, patch_of
from everstate.pipeline.derive.verify import _Judge

LONG = "12345678901234567890.12"
MESSAGE = (
    f'{{"version": 2, "originalEntityState": {{"a": {LONG}1, "b": 1}},'
    f' "currentEntityState": {{"a": {LONG}2, "b": true}}}}'
)


def reason(derivation: Derivation, found: str) -> str | None:
    """What the proof says about this record of that change."""
    row = {"key": "k", "version": 2, "found_version": 2, "batch": None}
    told = _Judge(derivation)._wrong({**row, "raw_value": MESSAGE, "found": found})
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
