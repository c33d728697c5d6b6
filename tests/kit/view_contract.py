"""Contract of all stores of views; a store's test class inherits `ViewContract`.

It provides the fixture ``kept``: a :class:`KeptOrders`, which drives the store under test. The
oracle (:mod:`kit.view_oracle`) uses no SQL, no sums and no batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import ClassVar, Protocol

import pyarrow as pa
import pytest

from everstate.errors import HeldOverflow, PositionMoved
from everstate.log.positions import Range
from everstate.views.core import Applied, CoreStore, apply_range
from everstate.views.plain import apply_plain
from everstate.views.tables import Core, KeptTable, planned_column
from everstate.views.trailing import Exceptions, TrailingStore, trail_range
from kit.view_oracle import OracleTables, differences, expected
from kit.view_orders import (
    HISTORY,
    TABLES,
    Log,
    history,
    logged,
    orders,
    random_logs,
    state_of,
)

BY_REGION, TOTALS, OPEN = TABLES["by_region"], TABLES["totals"], TABLES["open_orders"]


class ViewStore(CoreStore, TrailingStore, Protocol):
    """A store of cores and of trailing views."""


class KeptOrders(ABC):
    """Views of orders in a store under test."""

    @property
    @abstractmethod
    def under_test(self) -> ViewStore:
        """The store."""

    @abstractmethod
    def reset(self, partitions: int) -> None:
        """Start again with empty views at offset 0 of some partitions."""

    @abstractmethod
    def tables(self) -> OracleTables:
        """Rows that readers see, and the account of all records."""

    @abstractmethod
    def vector(self, table: KeptTable | None = None) -> dict[int, int]:
        """Positions of a view, or of the core."""

    @abstractmethod
    def advance(self, core: Core, ranges: Mapping[int, Range]) -> None:
        """Advance the core, and the views that ride with it, over ranges without records (V8)."""

    @abstractmethod
    def exceptions(self, partition: int, start: int, end: int) -> Exceptions:
        """The exceptions that the core recorded in a range."""

    @abstractmethod
    def trim(self, below: Mapping[int, int]) -> int:
        """Drop notes before these offsets; returns how many (V4)."""

    def core(self, riders: Sequence[KeptTable] | None = None, *, held_max: int = 10_000) -> Core:
        """The core, with the history and all views riding, or with some."""
        every = (HISTORY, *TABLES.values())
        mine = every if riders is None else tuple(riders)
        return Core("order", "orders", mine, ids=HISTORY, held_max=held_max)

    def without(self, *names: str) -> Core:
        """A core in which some views do not ride."""
        return self.core([rider for rider in self.core().riders if rider.view not in names])

    def apply(
        self, partition: int, start: int, end: int, changes: pa.Table, *, core: Core | None = None
    ) -> Applied:
        """Let the core apply a range like a task: record by record if it is not plain."""
        given, mine = Range(start, end), core or self.core()
        with suppress(PositionMoved):  # the careful way returns what came before
            if (done := apply_plain(self.under_test, mine, partition, given, changes)) is not None:
                return done
        return self.judge(partition, start, end, changes, core=mine)

    def judge(
        self, partition: int, start: int, end: int, changes: pa.Table, *, core: Core | None = None
    ) -> Applied:
        """Let the core judge a range record by record."""
        given = Range(start, end)
        return apply_range(self.under_test, core or self.core(), partition, given, changes)

    def trail(
        self,
        table: KeptTable,
        partition: int,
        start: int,
        end: int,
        changes: pa.Table,
        *,
        meets: bool = False,
    ) -> Applied:
        """Let a lagging view apply a range that the core has judged."""
        span, core = Range(start, end), self.core()
        return trail_range(self.under_test, core, table, partition, span, changes, meets=meets)


def check(kept: KeptOrders, logs: Iterable[Log]) -> None:
    """Raise AssertionError with the differences between the views and the oracle."""
    wrong = differences(kept.tables(), expected(logs))
    assert not wrong, wrong


def _with_a_gap() -> Log:
    """A version that waits for the one before it."""
    one, two, three = history("a", [state_of("a", quantity=n) for n in (1, 2, 3)])
    return logged(one, three, two)


class ViewContract:
    """Contract of all stores of views; provide the fixture ``kept``."""

    histories: ClassVar[int] = 10
    """How many random histories the next test uses; a full run uses 100."""

    def test_law_2_and_6_any_logs_in_any_ranges_give_the_tables_of_the_oracle(
        self, kept: KeptOrders
    ) -> None:
        """Ranges are cut anywhere, in any order of partitions, repeated, and overlapping.

        Some views ride, some trail, and they switch between both.
        """
        for seed in range(self.histories):
            try:
                self._keep_random_logs(kept, Random(seed))
            except AssertionError as wrong:
                raise AssertionError(f"seed {seed}: {wrong}") from wrong

    def _keep_random_logs(self, kept: KeptOrders, random: Random) -> None:
        logs = random_logs(random, random.randint(1, 4), disorder=8)
        kept.reset(len(logs))
        # The history rides: without it an old version's conflict counts as a duplicate.
        others = [each for each in kept.core().riders if each != HISTORY]
        while kept.vector() != {number: log.end for number, log in enumerate(logs)}:
            number, core = random.choice(list(kept.vector().items()))
            log, riders = logs[number], [each for each in others if random.random() < 0.6]
            if core < log.end:
                end, start = random.randint(core + 1, log.end), random.randint(0, core)
                mine = kept.core([HISTORY, *riders])
                kept.apply(number, start, end, log.between(start, end), core=mine)
            self._catch_up(kept, number, log, random, random.choice(others))
        for number, log in enumerate(logs):
            for each in others:
                self._catch_up(kept, number, log, random, each, whole=True)
        check(kept, logs)

    @staticmethod
    def _catch_up(
        kept: KeptOrders,
        number: int,
        log: Log,
        random: Random,
        table: KeptTable,
        *,
        whole: bool = False,
    ) -> None:
        """Let a view catch up with the core, in part or completely."""
        while (position := kept.vector(table)[number]) < kept.vector()[number]:
            end = random.randint(position + 1, kept.vector()[number])
            # Changes that were held before the range are read again with it.
            changes = log.between(0, end)
            kept.trail(table, number, position, end, changes, meets=random.random() < 0.5)
            if not whole:
                return

    def test_a_range_that_is_written_quickly_gives_what_judging_it_gives(
        self, kept: KeptOrders
    ) -> None:
        """Tables, account, positions and notes are the same."""
        for seed in range(self.histories):
            random = Random(seed)
            self._keep_both_ways(kept, random, random_logs(random, 2, disorder=seed % 4))

    def _keep_both_ways(self, kept: KeptOrders, random: Random, logs: list[Log]) -> None:
        ends = [sorted({log.end, *(random.randint(0, log.end) for _ in range(3))}) for log in logs]
        found = []
        for apply in (kept.apply, kept.judge):
            kept.reset(len(logs))
            for number, log in enumerate(logs):
                for start, end in pairwise(sorted({0, *ends[number]})):
                    apply(number, start, end, log.between(start, end))
            recorded = [kept.exceptions(number, 0, log.end) for number, log in enumerate(logs)]
            found.append((kept.tables(), recorded, kept.vector(), kept.vector(TOTALS)))
        assert found[0] == found[1]

    def test_a_log_without_disorder_is_written_quickly_throughout(self, kept: KeptOrders) -> None:
        """Including deletions, entities that are created again, and late reports."""
        for seed in range(self.histories):
            random = Random(seed)
            (log,) = random_logs(random, 1, disorder=0)
            kept.reset(1)
            middle = random.randint(1, log.end)
            for start, end in pairwise(sorted({0, middle, log.end})):
                given, changes = Range(start, end), log.between(start, end)
                done = apply_plain(kept.under_test, kept.core(), 0, given, changes)
                assert done is not None
                assert done.applied == changes.num_rows
            check(kept, [log])

    @pytest.mark.parametrize("ends", [(3,), (1, 3), (2, 3), (1, 2, 3)])
    def test_law_3_a_broken_chain_shows_in_the_sums_however_the_log_is_cut(
        self, kept: KeptOrders, ends: tuple[int, ...]
    ) -> None:
        """A batch sums every change of a key, so that the proof finds mismatches."""
        one, two, three = history("a", [state_of("a", quantity=n) for n in (1, 2, 5)])
        log = logged(one, two, replace(three, original=state_of("a", quantity=4)))
        for start, end in pairwise([0, *ends]):
            kept.apply(0, start, end, log.between(start, end))
        assert kept.tables().totals == [(1, 1 - 1 + 2 - 4 + 5)]

    def test_applying_a_range_twice_changes_nothing(self, kept: KeptOrders) -> None:
        """The position skips records that are read twice."""
        log = logged(*history("a", [state_of("a", region="north", quantity=3), None]))
        for _ in range(3):
            kept.apply(0, 0, log.end, log.between(0, log.end))
        check(kept, [log])

    def test_c12_partitions_without_records_advance_with_their_riders(
        self, kept: KeptOrders
    ) -> None:
        """Only from the core's position; a range that starts after it changes nothing."""
        kept.reset(3)
        kept.advance(kept.core(), {0: Range(0, 7), 1: Range(5, 9), 2: Range(0, 4)})
        kept.advance(kept.core(), {2: Range(0, 2)})
        assert kept.vector() == kept.vector(TOTALS) == {0: 7, 1: 0, 2: 4}

    def test_v8_a_view_that_is_behind_does_not_ride_over_a_range_without_records(
        self, kept: KeptOrders
    ) -> None:
        """It would skip the records in between."""
        log = orders(3)
        kept.apply(0, 0, 3, log.between(0, 3), core=kept.without("totals"))
        kept.advance(kept.core(), {0: Range(3, 9)})
        vectors = [kept.vector(), kept.vector(BY_REGION), kept.vector(TOTALS)]
        assert vectors == [{0: 9}, {0: 9}, {0: 0}]

    def test_c12_the_position_is_the_end_of_the_range_not_of_the_rows(
        self, kept: KeptOrders
    ) -> None:
        """Offsets without records are passed too."""
        log = orders(3)
        log.skip(5)
        kept.apply(0, 0, log.end, log.between(0, log.end))
        assert kept.vector() == kept.vector(TOTALS) == {0: 8}

    def test_c13_a_view_that_was_left_behind_catches_up_and_rides_again(
        self, kept: KeptOrders
    ) -> None:
        """All other views advance meanwhile."""
        log = orders(6, versions=3)
        kept.apply(0, 0, 5, log.between(0, 5))
        kept.apply(0, 5, log.end, log.between(5, log.end), core=kept.without("by_region"))
        assert differences(kept.tables(), expected([log])).keys() == {"by_region"}
        kept.trail(BY_REGION, 0, 5, 9, log.between(5, 9))
        kept.trail(BY_REGION, 0, 9, log.end, log.between(9, log.end), meets=True)
        check(kept, [log])
        later = Log({log.end: history("z", [state_of("z", region="east")])[0]}, log.end + 1)
        kept.apply(0, log.end, later.end, later.between(log.end, later.end))
        log.append(later.records[log.end])
        assert kept.vector(BY_REGION) == kept.vector()
        check(kept, [log])

    def test_a_trailing_view_applies_what_waited_where_it_was_freed(self, kept: KeptOrders) -> None:
        """It applies it at the offset that released it, not at its own."""
        one, two, three = history("a", [state_of("a", quantity=n) for n in (1, 2, 3)])
        log = logged(one, three, two, *orders(2).records.values())
        behind = kept.without("totals", "order_history", "open_orders")
        for start, end in ((0, 2), (2, log.end)):
            kept.apply(0, start, end, log.between(start, end), core=behind)
        # [0, 2) has the first version only: the third was held there.
        for table in (TOTALS, OPEN, HISTORY):
            kept.trail(table, 0, 0, 2, log.between(0, 2))
        assert kept.tables().totals == [(1, 1)]
        # The third is read again with the range in which it was released.
        for table in (TOTALS, OPEN, HISTORY):
            kept.trail(table, 0, 2, log.end, log.between(1, log.end))
        check(kept, [log])

    def test_a_trailing_view_skips_what_the_core_recorded(self, kept: KeptOrders) -> None:
        """Duplicates, conflicts and unreadable records."""
        (one,) = history("a", [state_of("a", quantity=1)])
        other = replace(one, change_id="00000000-0000-0000-0000-00000000000f")
        log = logged(
            one, other, one, one, replace(one, reason="malformed"), *orders(1).records.values()
        )
        kept.apply(0, 0, log.end, log.between(0, log.end), core=kept.without("totals"))
        kept.trail(TOTALS, 0, 0, 3, log.between(0, 3))
        kept.trail(TOTALS, 0, 3, log.end, log.between(3, log.end))
        check(kept, [log])

    def test_a_trailing_view_never_passes_the_core(self, kept: KeptOrders) -> None:
        """Records that the core has not judged are not accepted yet."""
        log = orders(6)
        kept.apply(0, 0, 3, log.between(0, 3), core=kept.without("totals"))
        with pytest.raises(PositionMoved):
            kept.trail(TOTALS, 0, 0, 6, log.between(0, 6))
        assert kept.vector(TOTALS) == {0: 0}

    def test_v10_a_plan_that_changed_under_the_same_version_writes_nothing(
        self, kept: KeptOrders
    ) -> None:
        """A position belongs to one fingerprint."""
        log = orders(3)
        other = replace(TOTALS, fingerprint="another meaning")
        kept.apply(0, 0, 3, log.between(0, 3), core=kept.core([other]))
        assert kept.vector(TOTALS) == {0: 0}
        with pytest.raises(PositionMoved):
            kept.trail(other, 0, 0, 3, log.between(0, 3))
        assert kept.tables().totals == [(0, None)]

    def test_c14_a_gap_holds_and_its_filling_releases_in_order(self, kept: KeptOrders) -> None:
        """Held changes are in the account, and in no table."""
        states = [state_of("a", region=r, quantity=1) for r in ("north", "south", "east", "west")]
        one, two, three, four = history("a", states)
        log = logged(one, four, three)
        done = kept.apply(0, 0, 3, log.between(0, 3))
        assert (done.applied, done.held) == (1, 2)
        check(kept, [log])
        log.append(two)
        done = kept.apply(0, 3, 4, log.between(3, 4))
        assert (done.applied, done.released, done.held) == (3, 2, 0)
        check(kept, [log])

    def test_c14_more_held_than_allowed_stops_the_core(self, kept: KeptOrders) -> None:
        """Changes up to the limit are held; no change is lost, and none is skipped."""
        log = logged(*history("b", [state_of("b")]), *history("a", [state_of("a")] * 6)[1:])
        for _ in range(2):
            with pytest.raises(HeldOverflow, match="5 changes wait"):
                kept.apply(0, 0, 6, log.between(0, 6), core=kept.core(held_max=3))
            assert kept.vector() == kept.vector(TOTALS) == {0: 4}
        kept.apply(0, 4, 6, log.between(4, 6), core=kept.core(held_max=5))
        check(kept, [log])

    def test_c14_what_goes_on_makes_room_for_what_waits(self, kept: KeptOrders) -> None:
        """Released changes do not count any more."""
        one, *later = history("a", [state_of("a")] * 4)
        log = logged(*later, one, *history("b", [state_of("b")] * 4)[1:])
        kept.apply(0, 0, 3, log.between(0, 3), core=kept.core(held_max=3))
        kept.apply(0, 3, 7, log.between(3, 7), core=kept.core(held_max=3))
        check(kept, [log])

    def test_v2_a_view_that_a_held_change_was_not_planned_for_trails_the_range(
        self, kept: KeptOrders
    ) -> None:
        """It reads the change again, planned for it."""
        log = _with_a_gap()
        first = log.between(0, 2)
        names = [n for n in first.column_names if not n.startswith("totals__")]
        self._held_for_others(kept, log, first.select(names))

    def test_v2_a_held_change_is_not_taken_for_a_view_that_had_the_number_before(
        self, kept: KeptOrders
    ) -> None:
        """Its row is of the former meaning, and may be of another type."""
        log = _with_a_gap()
        first, former = log.between(0, 2), replace(TOTALS, fingerprint="former")
        for image in TOTALS.images:
            place = first.column_names.index(planned_column(TOTALS, image))
            texts = pa.array(["of another type"] * first.num_rows)
            first = first.set_column(place, planned_column(former, image), texts)
        self._held_for_others(kept, log, first)

    def _held_for_others(self, kept: KeptOrders, log: Log, first: pa.Table) -> None:
        """Hold the first changes as they are; `totals` then trails what releases them."""
        kept.apply(0, 0, 2, first, core=kept.without("totals"))
        kept.trail(TOTALS, 0, 0, 2, log.between(0, 2))
        kept.apply(0, 2, 3, log.between(2, 3))
        assert (kept.vector(), kept.vector(TOTALS)) == ({0: 3}, {0: 2})
        kept.trail(TOTALS, 0, 2, 3, log.between(1, 3))
        check(kept, [log])

    def test_v4_only_the_bytes_of_what_everybody_passed_are_trimmed(self, kept: KeptOrders) -> None:
        """The notes stay, so the accepted changes of any earlier range can be determined."""
        one, two, three = history("a", [state_of("a", quantity=n) for n in (1, 2, 3)])
        log = logged(one, one, three, two, replace(one, reason="malformed"))
        kept.apply(0, 0, log.end, log.between(0, log.end), core=kept.without("totals"))
        kept.trim({0: 0})
        kept.trail(TOTALS, 0, 0, log.end, log.between(0, log.end))
        check(kept, [log])
        before = kept.exceptions(0, 0, log.end)
        assert (kept.trim({0: log.end}), kept.trim({0: log.end})) == (1, 0)
        assert kept.exceptions(0, 0, log.end) == before
        recorded = (set(before.dead), before.duplicates, set(before.held), before.released)
        assert recorded == ({4}, ((1, 1),), {2}, {2: 3})

    def test_c16_a_group_is_gone_when_its_last_entity_is(self, kept: KeptOrders) -> None:
        """A view without groups always has one row."""
        log = logged(*history("a", [state_of("a", region="north", quantity=1), None]))
        kept.apply(0, 0, log.end, log.between(0, log.end))
        found = kept.tables()
        assert (found.by_region, found.totals) == ([], [(0, None)])

    @pytest.mark.parametrize("splits", [(4,), (1, 4), (2, 4), (3, 4), (1, 2, 3, 4)])
    def test_verdicts_depend_on_the_log_and_not_on_the_batches(
        self, kept: KeptOrders, splits: tuple[int, ...]
    ) -> None:
        """A change that was held only within a batch is recorded as held."""
        one, two, three = history("a", [state_of("a", quantity=n) for n in (1, 2, 3)])
        log = logged(three, two, one, two)
        start = 0
        for end in splits:
            kept.apply(0, start, end, log.between(start, end), core=kept.without("totals"))
            start = end
        recorded = kept.exceptions(0, 0, 4)
        assert (set(recorded.held), recorded.released) == ({0, 1}, {0: 2, 1: 2})
        assert recorded.duplicates == ((3, 3),)
        kept.trail(TOTALS, 0, 0, 2, log.between(0, 2))
        assert kept.tables().totals == [(0, None)]
        kept.trail(TOTALS, 0, 2, 4, log.between(0, 4))
        check(kept, [log])

    def test_a_late_report_never_makes_as_of_run_back(self, kept: KeptOrders) -> None:
        """Also when the history trails, because it has the earlier times itself."""
        records = history("a", [state_of("a", quantity=n) for n in range(4)], [3, 1, 5, 2])
        log = logged(*records)
        for n in range(4):
            kept.apply(0, n, n + 1, log.between(n, n + 1), core=kept.without("order_history"))
        kept.trail(HISTORY, 0, 0, 1, log.between(0, 1))
        kept.trail(HISTORY, 0, 1, 4, log.between(1, 4))
        check(kept, [log])
