"""The three forms of the generated changes are one and the same data."""

from __future__ import annotations

import orjson
from bench import data

from everstate.changes import ChangeCodec

INDEXES = (0, 1, 9_999, 20_001, 240_002, 480_003, 777_777, 1_000_003)


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


def test_the_changes_of_a_key_come_in_order_and_none_is_left_out() -> None:
    seen: dict[int, int] = {}
    updates = 0
    for index in range(1_000_000):
        at = data.place(index)
        assert at.step == seen.get(at.number, -1) + 1
        seen[at.number] = at.step
        updates += at.step > 0
    assert updates == 565_000
    assert all(seen[number] == data.CHANGES_PER_KEY - 1 for number in range(100_000))


def test_every_purchase_has_a_key_of_its_own() -> None:
    numbers = {data.place(index).number for index in range(100_000)}
    keys = {data.key_of(number) for number in numbers}
    assert len(keys) == len(numbers)
    assert all(len(key) == 10 for key in keys)


def test_a_change_is_about_610_bytes() -> None:
    sizes = [len(data.message(index)[1]) for index in range(500_000, 540_000, 997)]
    assert 580 <= sum(sizes) / len(sizes) <= 640
