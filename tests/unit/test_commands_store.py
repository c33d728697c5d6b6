from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from everstate.errors import StateStoreFailed
from everstate.sources.commands.slots import Slot
from everstate.sources.commands.store import (
    Batch,
    Meta,
    PartitionStore,
    answer_key,
    open_store,
    read_state_row,
    state_row,
)


def fill(store: PartitionStore) -> None:
    states = {b"a": state_row(3, b'{"x":1}'), b"gone": state_row(7, None)}
    store.write(Batch(states=states, answers={answer_key(b"a", b"1" * 16): b"yes"}), 1_000)
    store.save(replace(store.meta, topic_ids=["t"], state_next=9))


def test_what_was_written_is_there_after_opening_again(tmp_path: Path) -> None:
    store = open_store(tmp_path / "0", "f1", ["t"])
    fill(store)
    store.close()
    again = open_store(tmp_path / "0", "f1", ["t"])
    assert again.meta == Meta("f1", ["t"], 9)
    assert read_state_row(again.state(b"a") or b"") == (3, b'{"x":1}')
    assert read_state_row(again.state(b"gone") or b"") == (7, None)
    assert again.answer(answer_key(b"a", b"1" * 16)) == b"yes"
    assert again.answer(answer_key(b"b", b"1" * 16)) is None
    assert dict(again.states()) == {b"a": state_row(3, b'{"x":1}'), b"gone": state_row(7, None)}
    again.close()


@pytest.mark.parametrize(("fingerprint", "topic"), [("f2", "t"), ("f1", "other")])
def test_other_code_schema_or_topics_begin_anew(
    tmp_path: Path, fingerprint: str, topic: str
) -> None:
    store = open_store(tmp_path / "0", "f1", ["t"])
    fill(store)
    store.close()
    again = open_store(tmp_path / "0", fingerprint, [topic])
    assert (again.state(b"a"), again.meta) == (None, Meta(fingerprint))
    again.close()


def test_a_damaged_store_begins_anew(tmp_path: Path) -> None:
    store = open_store(tmp_path / "0", "f1", ["t"])
    fill(store)
    store.close()
    for name in ("CURRENT", "MANIFEST-000005", "MANIFEST-000004"):
        (tmp_path / "0" / name).write_bytes(b"not a manifest")
    again = open_store(tmp_path / "0", "f1", ["t"])
    assert again.state(b"a") is None
    again.close()


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = open_store(tmp_path / "0", "f1", [])
    store.close()
    with pytest.raises(StateStoreFailed, match="closed"):
        store.state(b"a")


def test_old_answers_are_forgotten_and_those_given_again_are_not(tmp_path: Path) -> None:
    store = open_store(tmp_path / "0", "f1", [])
    names = [answer_key(b"a", bytes([n]) * 16) for n in range(3)]
    store.write(Batch(answers={names[0]: b"0", names[1]: b"1"}), 1_000)
    store.write(Batch(answers={names[2]: b"2"}), 2_000)
    store.write(Batch(answers={names[1]: b"1 again"}), 3_000)
    assert store.forget(2_000) == 2
    assert [store.answer(name) for name in names] == [None, b"1 again", b"2"]
    assert store.forget(2_000) == 0
    assert store.forget(9_000) == 2
    assert [store.answer(name) for name in names] == [None, None, None]
    store.close()


def test_each_process_has_a_place_and_takes_its_former_one(tmp_path: Path) -> None:
    with Slot(tmp_path) as first, Slot(tmp_path) as second:
        assert (first.path.name, second.path.name) == ("0", "1")
        assert first.name != second.name
        name = first.name
    with Slot(tmp_path) as again:
        assert again.name == name
