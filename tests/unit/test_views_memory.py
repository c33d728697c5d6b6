"""The store in memory keeps what every store of views promises, so that simulations may use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import ClassVar

import pyarrow as pa
import pytest

from everstate.log.positions import Range
from everstate.views.batch import Batch
from everstate.views.core import apply_range
from everstate.views.trailing import Exceptions, accepted_of
from kit.view_contract import ViewContract
from kit.view_memory import MemoryCore, MemoryStore
from kit.view_memory_orders import KeptInMemory
from kit.view_oracle import accepted
from kit.view_orders import TABLES, history, logged, random_logs, state_of
from tiers import counted


class TestViewsInMemory(ViewContract):
    histories = counted(10, full=100)

    @pytest.fixture
    def kept(self) -> KeptInMemory:
        return KeptInMemory()


def test_values_that_do_not_fit_the_model_are_counted_when_their_change_is_applied() -> None:
    """The core judges envelopes: the state is kept as it was written."""
    kept = KeptInMemory()
    one, two, three = history("a", [state_of("a", quantity=n) for n in (1, 2, 3)])
    log = logged(one, three, *history("b", [state_of("b")]), two)

    def changes(start: int, end: int, *fields: list[str] | None) -> pa.Table:
        misfits = pa.array(fields, pa.list_(pa.string()))
        return log.between(start, end).append_column("misfits", misfits)

    store, core = kept.under_test, kept.core()
    waits = changes(0, 3, ["price"], ["price", "home.street"], None)
    done = apply_range(store, core, 0, Range(0, 3), waits)
    assert (done.applied, done.held, done.dead) == (2, 1, 0)
    assert store.database.table("misfit") == {(0, "price", 1): (1, 0, 0)}
    # A change that waited is counted when it is released.
    assert apply_range(store, core, 0, Range(3, 4), changes(3, 4, None)).released == 1
    assert store.database.table("misfit") == {
        (0, "price", 1): (2, 0, 1),
        (0, "home.street", 1): (1, 1, 1),
    }


def test_a_change_that_an_earlier_release_held_lacks_the_column_of_misfits() -> None:
    kept = KeptInMemory()
    one, two = history("a", [state_of("a", quantity=n) for n in (1, 2)])
    log = logged(two, one)
    store, core = kept.under_test, kept.core()
    assert apply_range(store, core, 0, Range(0, 1), log.between(0, 1)).held == 1
    misfits = pa.array([["price"]], pa.list_(pa.string()))
    changes = log.between(1, 2).append_column("misfits", misfits)
    assert apply_range(store, core, 0, Range(1, 2), changes).applied == 2
    assert store.database.table("misfit") == {(0, "price", 1): (1, 1, 1)}


class Noting(MemoryCore):
    """Notes the changes of each judged batch; each is committed in these tests."""

    judged: ClassVar[list[pa.Table]] = []

    def write_latest(self, batch: Batch) -> None:
        self.judged.append(batch.changes)
        super().write_latest(batch)


class NotingStore(MemoryStore):
    core_class = Noting


def named(changes: Sequence[pa.Table]) -> list[tuple[str, int, str]]:
    """Key, version and id of changes, in their order within a key."""
    columns = ("key", "version", "id")
    rows = [row for table in changes for row in table.select(columns).to_pylist()]
    found = [(row["key"], row["version"], row["id"].lower()) for row in rows]
    return sorted(found, key=lambda row: row[0])


def cuts(random: Random, end: int) -> list[Range]:
    places = sorted({0, end, *(random.randint(0, end) for _ in range(4))})
    return [Range(start, stop) for start, stop in pairwise(places)]


def forms(
    seed: int, spoil: Callable[[Exceptions], Exceptions] = lambda exceptions: exceptions
) -> list[list[tuple[str, int, str]]]:
    """The accepted changes of a log as the judged batches, the log and a batch have them."""
    random = Random(seed)
    (log,) = random_logs(random, 1, disorder=8)
    kept, Noting.judged = KeptInMemory(NotingStore), []
    for span in cuts(random, log.end):
        apply_range(kept.under_test, kept.core(), 0, span, log.between(span.start, span.end))
    trailed = []
    for span in cuts(random, log.end):
        exceptions = spoil(kept.exceptions(0, span.start, span.end))
        freed = [log.between(o, o + 1) for o in exceptions.released if o < span.start]
        changes = pa.concat_tables([*freed, log.between(span.start, span.end)])
        trailed.append(accepted_of(TABLES["totals"], span, changes, exceptions))
    batch = accepted([log], {0: log.end})
    expected = sorted(((r.key, r.version, r.change_id) for r in batch), key=lambda row: row[0])
    return [named(Noting.judged), named(trailed), expected]


@pytest.mark.parametrize("seed", range(counted(60, full=1_000)))
def test_accepted_changes_are_the_same_from_the_judged_batches_the_log_and_the_archive(
    seed: int,
) -> None:
    """Three forms of one thing: what rides, what trails, and what is built and proved."""
    judged, trailed, batch = forms(seed)
    assert judged == trailed == batch


SPOILT: Mapping[str, Callable[[Exceptions], Exceptions]] = {
    "no duplicates": lambda found: replace(found, duplicates=()),
    "held ones where they were read": lambda found: replace(found, held=frozenset(), released={}),
    "held ones twice": lambda found: replace(found, held=frozenset()),
}


@pytest.mark.parametrize("planted", SPOILT)
def test_planted_a_form_that_takes_other_changes_is_seen(planted: str) -> None:
    found = [forms(seed, SPOILT[planted]) for seed in range(60)]
    assert any(judged != trailed for judged, trailed, _ in found)
