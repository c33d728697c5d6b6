"""ETags and conditions of requests, as RFC 9110 means them."""

from __future__ import annotations

import pytest

from everstate.errors import InvalidRequest, PreconditionFailed
from everstate.http.etags import Conditions, etag, parse_condition


def conditions(match: str | None = None, none_match: str | None = None) -> Conditions:
    return Conditions(
        parse_condition("If-Match", match), parse_condition("If-None-Match", none_match)
    )


@pytest.mark.parametrize(
    ("match", "none_match", "version", "holds"),
    [
        ('"3"', None, 3, True),
        ('"3"', None, 4, False),
        ('"3"', None, None, False),
        ('"2", "3"', None, 3, True),
        ('"2","3"', None, 3, True),
        ('W/"3"', None, 3, False),
        ("*", None, 3, True),
        ("*", None, None, False),
        (None, "*", None, True),
        (None, "*", 1, False),
        (None, '"3"', 3, False),
        (None, 'W/"3"', 3, False),
        (None, '"3"', 4, True),
        (None, '"3"', None, True),
        ('"not-ours"', None, 3, False),
        ('"03"', None, 3, False),
        (None, None, None, True),
    ],
)
def test_a_condition_holds_or_is_refused_with_the_present_version(
    match: str | None, none_match: str | None, version: int | None, holds: bool
) -> None:
    asked = conditions(match, none_match)
    if holds:
        asked.check("order", "o-1", version)
        return
    with pytest.raises(PreconditionFailed) as refusal:
        asked.check("order", "o-1", version)
    assert refusal.value.version == (version or 0)


@pytest.mark.parametrize("value", ["3", "", '"3', '"3" "4"', "W/3", '"a\tb"', "*, *"])
def test_what_is_no_list_of_tags_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="If-Match"):
        parse_condition("If-Match", value)


def test_a_reader_that_has_the_version_is_told_so() -> None:
    assert conditions(none_match=etag(7)).not_modified(7)
    assert conditions(none_match='W/"7"').not_modified(7)
    assert not conditions(none_match=etag(6)).not_modified(7)
    assert not conditions().not_modified(7)
