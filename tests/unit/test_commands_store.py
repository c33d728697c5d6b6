from __future__ import annotations

from pathlib import Path

import pytest

from everstate.errors import LogTruncated, StateStoreFailed
from everstate.log.slots import Slot
from everstate.log.state_copy import CopyMeta, StateCopy, open_copy
from everstate.sources.commands.store import (
    FORM,
    NEVER,
    PartitionStore,
    StoreBatch,
    answer_key,
    open_store,
    read_state_row,
    state_row,
)


def fill(store: PartitionStore) -> None:
    states = {b"a": state_row(3, b'{"x":1}'), b"gone": state_row(7, None)}
    store.write(StoreBatch(states=states, answers={answer_key(b"a", b"1" * 16): b"yes"}), 1_000)
    store.copy.prove({("t", 0): 9})


def test_what_was_written_is_there_after_opening_again(tmp_path: Path) -> None:
    store = open_store(tmp_path / "0", "f1", {"t": "1"})
    fill(store)
    store.close()
    again = open_store(tmp_path / "0", "f1", {"t": "1"})
    assert again.copy.meta == CopyMeta(FORM + "f1", {"t": "1"}, {"t[0]": 9})
    assert read_state_row(again.state(b"a") or b"") == (3, b'{"x":1}', NEVER)
    assert read_state_row(again.state(b"gone") or b"") == (7, None, NEVER)
    assert again.answer(answer_key(b"a", b"1" * 16)) == b"yes"
    assert again.answer(answer_key(b"b", b"1" * 16)) is None
    states = dict(again.copy.scan(b"s"))
    assert states == {b"sa": state_row(3, b'{"x":1}'), b"sgone": state_row(7, None)}
    again.close()


@pytest.mark.parametrize(("fingerprint", "topic"), [("f2", "1"), ("f1", "2")])
def test_other_code_schema_or_topics_begin_anew(
    tmp_path: Path, fingerprint: str, topic: str
) -> None:
    store = open_store(tmp_path / "0", "f1", {"t": "1"})
    fill(store)
    store.close()
    again = open_store(tmp_path / "0", fingerprint, {"t": topic})
    assert (again.state(b"a"), again.copy.meta) == (
        None,
        CopyMeta(FORM + fingerprint, {"t": topic}),
    )
    again.close()


def test_a_damaged_store_begins_anew(tmp_path: Path) -> None:
    store = open_store(tmp_path / "0", "f1", {"t": "1"})
    fill(store)
    store.close()
    for name in ("CURRENT", "MANIFEST-000005", "MANIFEST-000004"):
        (tmp_path / "0" / name).write_bytes(b"not a manifest")
    again = open_store(tmp_path / "0", "f1", {"t": "1"})
    assert again.state(b"a") is None
    again.close()


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = open_store(tmp_path / "0", "f1", {})
    store.close()
    with pytest.raises(StateStoreFailed, match="closed"):
        store.state(b"a")


def test_old_answers_are_forgotten_and_those_given_again_are_not(tmp_path: Path) -> None:
    store = open_store(tmp_path / "0", "f1", {})
    names = [answer_key(b"a", bytes([n]) * 16) for n in range(3)]
    store.write(StoreBatch(answers={names[0]: b"0", names[1]: b"1"}), 1_000)
    store.write(StoreBatch(answers={names[2]: b"2"}), 2_000)
    store.write(StoreBatch(answers={names[1]: b"1 again"}), 3_000)
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


def test_only_ends_that_were_asked_for_before_a_commit_are_proved(tmp_path: Path) -> None:
    copy = open_copy(tmp_path / "0", "f1", {"t": "1"})
    place = ("t", 0)
    copy.ask({place: 5})
    copy.settle({b"a": b"1"}, batch=1)
    assert (copy.next_of(place), copy.meta.batch) == (5, 1)
    copy.settle({b"a": b"2"}, batch=2)
    assert copy.next_of(place) == 5, "nobody asked before that transaction"
    copy.ask({place: 9})
    copy.forget_asked()
    copy.settle({}, batch=3)
    assert copy.next_of(place) == 5, "the transaction that would prove it was not committed"
    copy.ask({place: 9})
    copy.settle({}, proves=False)
    assert copy.next_of(place) == 5
    assert copy.is_ahead({place: 4})
    assert not copy.is_ahead({place: 5})
    copy.check("the reader", {place: 5})
    with pytest.raises(LogTruncated, match=r"the reader: .* t\[0\] ends at 4, .* 4 to 4 are lost"):
        copy.check("the reader", {place: 4})
    copy.close()


def test_a_row_of_another_form_is_no_row_of_a_copy(tmp_path: Path) -> None:
    from rocksdict import Options, Rdict

    options = Options(raw_mode=True)
    options.create_if_missing(True)
    former = Rdict(str(tmp_path / "0"), options)
    former[b"m"] = b'{"fingerprint":"f1","topic_ids":["1"],"state_next":9}'
    former.close()
    with pytest.raises(StateStoreFailed):
        StateCopy(tmp_path / "0", "f1")
    copy = open_copy(tmp_path / "0", "f1", {"t": "1"})
    assert copy.meta == CopyMeta("f1", {"t": "1"})
    copy.close()
