"""Whole rows from what sources give: any operations, forms, re-reads and batches (C10)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clean_cases import FORMS, Cleaner, Database, broken_laws, capture_of
from everstate.sources.cdc import completion
from everstate.sources.cdc.completion import PRIOR_UNKNOWN
from tiers import counted

EXAMPLES = counted(25, full=500)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["", "a", "b"]),
        "amount": st.sampled_from([None, 0, 1]),
        "note": st.sampled_from([None, "", "long"]),
    },
)
WRITES = st.lists(st.tuples(st.integers(1, 3), st.none() | VALUES), min_size=1, max_size=25)
CUTS = st.lists(st.integers(1, 6), min_size=1, max_size=40)
REWINDS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=4)


def form_of(name: str) -> Any:
    return name.partition(",")[0]


def whole_before(name: str) -> dict[str, Any]:
    return {"table": {"before": "whole"}} if name == "debezium, full" else {}


def with_rewinds(log: list[Any], rewinds: list[tuple[int, int]]) -> list[Any]:
    """The log as a capture that was killed gives it: pieces of it again, from an earlier place."""
    found: list[Any] = []
    for index, message in enumerate(log):
        found.append(message)
        for at, back in rewinds:
            if at == index:
                found += log[max(0, index + 1 - back) : index + 1]
    return found


def cleaned(log: list[Any], cuts: list[int], form: str) -> Cleaner:
    cleaner = Cleaner(capture_of(form_of(form), **whole_before(form)))
    rest = iter(log)
    for size in itertools.chain(cuts, itertools.repeat(7)):
        batch = list(itertools.islice(rest, size))
        if not batch:
            break
        cleaner.take(batch)
    return cleaner


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(writes=WRITES, cuts=CUTS, rewinds=REWINDS)
def test_every_state_is_there_once_whatever_the_form_the_batches_and_the_rereads(
    form: str, writes: list[Any], cuts: list[int], rewinds: list[tuple[int, int]]
) -> None:
    database = Database(form)
    for key, values in writes:
        database.write(key, values)
    cleaner = cleaned(with_rewinds(database.log, rewinds), cuts, form)
    # Canal tells no place, so what it sends again after a restart looks the same as a change.
    may_repeat = form == "canal"
    assert broken_laws(cleaner.changes, database.history, may_repeat=may_repeat) == []
    assert not cleaner.held


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(earlier=WRITES, later=WRITES, cuts=CUTS)
def test_a_capture_that_begins_late_never_invents_and_is_right_after_a_snapshot(
    form: str, earlier: list[Any], later: list[Any], cuts: list[int]
) -> None:
    database = Database(form)
    for key, values in earlier:
        database.write(key, values)
    database.log.clear()
    for key, values in later:
        database.write(key, values)
    cleaner = cleaned(database.log, cuts, form)
    assert broken_laws(cleaner.changes, database.history, is_whole=False) == []
    if form.startswith("debezium"):
        asked = [one for one in cleaner.held.values() if one.needs_snapshot]
        assert len(asked) == len(cleaner.held)
        database.log.clear()
        for one in asked:
            database.read(int(one.key))
        cleaner.take(database.log)
        assert broken_laws(cleaner.changes, database.history, is_whole=False) == []
        assert not cleaner.held


def test_an_update_of_a_row_never_seen_is_held_and_asks_for_a_snapshot_of_its_key() -> None:
    database = Database("debezium, default")
    database.write(1, {"name": "a", "note": "long"})
    database.log.clear()
    database.write(1, {"name": "b"})
    database.write(1, {"amount": 7})
    cleaner = Cleaner(capture_of("debezium"))
    cleaner.take(database.log)
    assert cleaner.changes == []
    held = cleaner.held["item", "1"]
    assert (held.reason, held.columns, held.needs_snapshot) == (PRIOR_UNKNOWN, {"id": 1}, True)
    database.log.clear()
    database.read(1)
    database.write(1, {"name": "c"})
    cleaner.take(database.log)
    assert [one.kind for one in cleaner.changes] == ["created", "updated"]
    assert broken_laws(cleaner.changes, database.history, is_whole=False) == []


def test_what_a_default_identity_says_of_a_deleted_row_is_not_believed() -> None:
    database = Database("debezium, default")
    database.write(1, {"name": "a"})
    database.log.clear()
    database.write(1, None)
    cleaner = Cleaner(capture_of("debezium"))
    cleaner.take(database.log)
    assert cleaner.changes == []
    assert cleaner.batches[0].skipped == {completion.NEVER_SEEN: 1}


def planted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A defect that a plausible first version has."""
    if name == "re-reads are taken for news":
        monkeypatch.setattr(completion, "is_after", lambda new, old: True)
    elif name == "an unknown state is filled with nulls":
        nothing = b'{"name":"","amount":null,"note":null}'
        monkeypatch.setattr(completion, "_base", lambda *_: nothing)
    else:
        monkeypatch.setattr(
            completion,
            "_base",
            lambda row, known, *_: (
                None if known is None else _FIRST.setdefault(row.key, known.image)
            ),
        )


_FIRST: dict[str, bytes] = {}


@pytest.mark.parametrize(
    "defect",
    [
        "re-reads are taken for news",
        "an unknown state is filled with nulls",
        "a row is completed from an old state",
    ],
)
def test_the_checker_catches_a_planted_defect(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, defect)
    database = Database("debezium, default")
    database.write(1, {"name": "a", "note": "long"})
    database.write(1, {"name": "b"})
    database.write(1, {"note": "longer"})
    database.write(1, {"name": "c"})
    cleaner = Cleaner(capture_of("debezium"))
    cleaner.take(with_rewinds(database.log, [(2, 2), (3, 3)]))
    assert broken_laws(cleaner.changes, database.history)
