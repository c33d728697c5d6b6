"""The three forms of the generated changes are one and the same data."""

from __future__ import annotations

import orjson
from bench import data

from everstate.changes import ChangeCodec, Kind

INDEXES = (0, 1, 9_999, 10_000, 25_017, 39_999, 40_000, 777_777, 1_000_003)


def test_messages_are_what_the_codec_makes_of_the_changes() -> None:
    codec = ChangeCodec(data.PURCHASE)
    for index in INDEXES:
        assert data.message(index) == codec.encode(data.change(index))


def test_plain_dicts_have_the_same_bytes_in_orjson() -> None:
    for index in INDEXES:
        assert orjson.dumps(data.plain(index)) == data.message(index)[1]


def test_a_state_is_valid_for_the_model() -> None:
    for index in INDEXES:
        current = data.change(index).current
        assert current is not None
        assert data.PURCHASE.validate(current.model_dump()) == current


def test_each_key_has_four_changes_in_order() -> None:
    seen: dict[str, int] = {}
    for each in data.changes(0, 2 * data.BLOCK_KEYS * data.CHANGES_PER_KEY):
        assert each.version == seen.get(each.key, 0) + 1
        assert (each.kind is Kind.CREATED) == (each.version == 1)
        seen[each.key] = each.version
    assert set(seen.values()) == {data.CHANGES_PER_KEY}
    assert len(seen) == 2 * data.BLOCK_KEYS


def test_a_change_is_about_610_bytes() -> None:
    sizes = [len(data.message(index)[1]) for index in range(0, 40_000, 997)]
    assert 580 <= sum(sizes) / len(sizes) <= 640
