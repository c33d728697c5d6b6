"""Moments as people write them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from everstate.changes.written import parse_moment
from everstate.errors import InvalidQuery

BLIZZARD = datetime(2013, 2, 8, 23, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    [
        "2013-02-08T18:00:00-05:00",
        "2013-02-08 18:00-05:00",
        "2013-02-08T23:00Z",
        "2013-02-08 18:00 America/New_York",
        " 2013-02-08T18:00 America/New_York ",
    ],
)
def test_a_moment_is_read_with_its_offset_or_its_zone(text: str) -> None:
    assert parse_moment(text) == BLIZZARD


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2013-02-08 18:00", "2013-02-08T18:00:00Z"),
        ("2013-02-08", "no UTC offset"),
        ("yesterday", "cannot be read"),
        ("2013-02-08 18:00 Nowhere/Land", "no time zone 'Nowhere/Land'"),
        ("2013-02-08 18:00 Europe", "no time zone 'Europe'"),
        (f"2013-02-08 18:00 {'x' * 300}", "no time zone 'xxx"),
        ("2013-02-08 18:00-05:00 America/New_York", "write one of them"),
        ("2013-02-30 18:00Z", "cannot be read"),
        (
            "2024-11-03 01:45 America/New_York",
            "comes twice.*2024-11-03T01:45:00-04:00 or 2024-11-03T01:45:00-05:00",
        ),
        (
            "2024-03-10 02:30 America/New_York",
            "comes never.*2024-03-10T02:30:00-05:00 or 2024-03-10T02:30:00-04:00",
        ),
        ("2026-03-29 02:30 Europe/Vienna", "comes never"),
        ("", "cannot be read"),
    ],
)
def test_what_is_no_moment_is_refused_with_what_to_write(text: str, said: str) -> None:
    with pytest.raises(InvalidQuery, match=said):
        parse_moment(text)
