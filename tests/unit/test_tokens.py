"""Tokens: opaque texts that say how far something was read, or what was written."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstate.changes.tokens import (
    Claim,
    LogPosition,
    Spot,
    Token,
    log_mark,
    parse_since,
    parse_token,
    written_token,
)
from everstate.errors import InvalidToken

NUMBERS = st.integers(0, 2**63 - 1)
NAMES = st.text(min_size=1, max_size=20)
POSITIONS = st.builds(
    LogPosition,
    st.binary(min_size=8, max_size=8),
    st.dictionaries(
        st.tuples(st.integers(1, 9), st.integers(0, 500)),
        st.builds(Spot, NUMBERS, st.integers(0, 99)),
    ),
)
TOKENS = st.builds(
    Token,
    st.dictionaries(NAMES, POSITIONS, max_size=3),
    st.lists(st.builds(Claim, NAMES, NAMES, NUMBERS), max_size=3).map(tuple),
    st.none() | NAMES,
)


@given(TOKENS)
def test_a_token_is_read_as_it_was_written(token: Token) -> None:
    assert parse_token(str(token)) == token
    assert parse_token(f"  {token}\n") == token


@given(TOKENS, st.randoms(use_true_random=False))
def test_a_token_that_was_cut_or_mistyped_is_refused(token: Token, random: object) -> None:
    text = str(token)
    for broken in (text[:-1], text[:-4], text[3:], text + "A", text[:5] + "é" + text[6:]):
        with pytest.raises(InvalidToken):
            parse_token(broken)


@pytest.mark.parametrize("text", ["", "e1.", "e1.AAAA", "e2.abc", "nonsense", "e1." + "-" * 40])
def test_what_is_no_token_is_refused_with_the_next_step(text: str) -> None:
    with pytest.raises(InvalidToken, match=r"the token cannot be used: .* Use a token of a write"):
        parse_token(text)


def test_a_token_says_nothing_that_a_url_or_a_header_does_not_take() -> None:
    position = LogPosition(log_mark("t", "c", "i"), {(1, p): Spot(10**12 + p) for p in range(12)})
    text = str(Token({"guest": position}))
    assert len(text) < 300
    assert text.isascii()
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")


def test_a_view_covers_a_spot_among_changes_of_one_offset_when_it_is_past_the_offset() -> None:
    assert (Spot(7).covered_by, Spot(7, 2).covered_by) == (7, 8)
    assert Spot(7) < Spot(7, 1) < Spot(7, 2) < Spot(8)


def test_a_written_version_is_a_claim_of_its_project() -> None:
    token = parse_token(str(written_token("hotel", "guest", "g1", 3)))
    assert (token.project, token.claims, token.positions) == (
        "hotel",
        (Claim("guest", "g1", 3),),
        {},
    )


def test_another_topic_cluster_or_name_is_another_log() -> None:
    marks = {
        log_mark(*ids)
        for ids in (("t", "c", "i"), ("t", "c", "j"), ("t", "d", "i"), ("u", "c", "i"))
    }
    assert len(marks) == 4


def test_a_reader_begins_at_a_token_or_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert parse_since("beginning") is parse_since("now") is None
        assert parse_since(str(Token())) == parse_since(f" {Token()}\n") == Token()
        noon = datetime(2026, 1, 2, 12, tzinfo=UTC)
        for text in ("2026-01-02T12:00:00Z", "2026-01-02T14:00:00+02:00", "2026-01-02 21:00:00"):
            assert parse_since(text) == noon
        today = datetime.now().astimezone().replace(hour=18, minute=0, second=0, microsecond=0)
        assert parse_since("today 18:00") == today
        assert parse_since("yesterday 18:00") == today - timedelta(days=1)
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    "text", ["", "nwo", "yesterday", "yesterday 25:00", "tomorrow 12:00", "2026-13-01T00:00:00Z"]
)
def test_what_is_neither_a_token_nor_a_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidToken, match="neither a token nor a time"):
        parse_since(text)
