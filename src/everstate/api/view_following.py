"""Subscriptions to a view: first all rows, then what differs at each later position.

No web framework here. The event `snapshot` has all rows, and `changed` the rows that differ between
two positions, each before and after; both have the token of their position. A subscriber that comes
back with the id of an event gets what differs since then, or a new snapshot when that is not
remembered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import orjson

from everstate.api.events import EventBatches, InThread, SharedReaders, StreamEvent, Subscriber
from everstate.app import App
from everstate.changes.quoting import conditions_in
from everstate.config import Config
from everstate.errors import InvalidQuery
from everstate.serving.predicates import condition
from everstate.serving.view_columns import ViewColumn, column_of
from everstate.serving.view_watch import RowChange, RowStep, SeenRow, ViewWatch, WholeView

Reason = Literal["began", "missed", "version"]
"""Why all rows come: the subscription begins; steps since its token are not remembered; readers
see another version of the view."""


@dataclass(frozen=True, slots=True)
class ViewWish:
    """What a subscriber of a view asks for."""

    view: str
    where: Sequence[str]
    """Conditions that a row must meet: `column=value`."""
    since: str | None
    """The id of the last event that it has."""

    @classmethod
    def of(cls, view: str, given: Mapping[str, str], last_id: str | None) -> ViewWish:
        """Read the parameters of a request; raises InvalidQuery, naming the parameter."""
        where = conditions_in(given.get("where", ""))
        return cls(view, where, last_id or given.get("since"))


class RowFilter:
    """Conditions on rows of one version of a view."""

    def __init__(self, wish: ViewWish, columns: Sequence[ViewColumn]) -> None:
        """Raises InvalidQuery for an unknown column, or another operator than `=`."""
        find = partial(column_of, wish.view, columns)
        conditions = [condition(text, find) for text in wish.where]
        for each in conditions:
            if each.operator != "=":
                raise InvalidQuery(f"where: a subscription takes = only, not {each.operator}.")
        names = [column.name for column in columns]
        self._places = [(names.index(each.term.name), each.value) for each in conditions]

    def seen(self, row: SeenRow | None) -> SeenRow | None:
        """The row, if it meets the conditions."""
        if row is None or not all(_is_same(row.values[at], value) for at, value in self._places):
            return None
        return row

    def changed(self, changes: Iterable[RowChange]) -> list[RowChange]:
        """The same changes as who sees only such rows sees them."""
        if not self._places:
            return list(changes)
        found = (RowChange(self.seen(each.before), self.seen(each.after)) for each in changes)
        return [each for each in found if each.before is not None or each.after is not None]


def _is_same(one: Any, other: Any) -> bool:
    """Whether values are equal in PostgreSQL, where NaN is equal to itself."""
    return bool(one == other or (one != one and other != other))


class ViewSubscriptions(SharedReaders[ViewWatch]):
    """The subscriptions to all views, and their watches. Used by one event loop."""

    def __init__(self, config: Config, app: App) -> None:
        super().__init__(partial(ViewWatch, config, app))

    async def open(self, wish: ViewWish, work: InThread[Any]) -> EventBatches:
        """Begin a subscription; out: its events, which end when it is closed or fails.

        ``work`` runs a blocking call in a thread. Raises UnknownView, NotFound, InvalidQuery,
        TooManyRows and Unavailable.
        """
        return await _ViewSubscriber(self, wish, work).opened()


class _ViewSubscriber(Subscriber[ViewSubscriptions, ViewWish]):
    """A subscription to the rows of a view."""

    _watch: ViewWatch

    async def begin(self) -> None:
        """Join the watch of the view; raises as :meth:`ViewSubscriptions.open`."""
        self._watch = await self.home.joined(self.wish.view, self.wake, self.work)
        try:
            RowFilter(self.wish, self._watch.whole().columns)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Stop following."""
        self._watch.leave(self.wake)

    async def events(self) -> EventBatches:
        """All rows, then each step; all rows again when steps are forgotten."""
        wish, watch = self.wish, self._watch
        whole = watch.whole()
        rows, version = RowFilter(wish, whole.columns), whole.version
        number = None if wish.since is None else watch.number_of(wish.since)
        reason: Reason = "began" if wish.since is None else "missed"
        while True:
            self.awake.clear()
            steps = None if number is None else watch.behind(number)
            if steps is None or number is None:
                whole = watch.whole()
                if whole.version != version:
                    reason = "version"
                    rows, version = RowFilter(wish, whole.columns), whole.version
                yield [_snapshot(watch, whole, rows, reason)]
                number, reason = whole.number, "missed"
                continue
            for step in steps:
                number = step.number
                changes = rows.changed(step.changes)
                if changes:
                    yield [_changed(watch, step, changes)]
            if steps:
                continue
            if watch.failure is not None:
                raise watch.failure.with_traceback(None)
            if not await self.is_awake():
                yield [StreamEvent("", token=watch.id_of(number))]


def _snapshot(watch: ViewWatch, whole: WholeView, rows: RowFilter, reason: Reason) -> StreamEvent:
    told = {
        "reason": reason,
        "version": whole.version,
        "token": whole.token,
        "columns": [column.name for column in whole.columns],
        "key": None if whole.key is None else [column.name for column in whole.key],
        "rows": [
            orjson.Fragment(row.json) for row in whole.rows.values() if rows.seen(row) is not None
        ],
    }
    return StreamEvent("snapshot", orjson.dumps(told).decode(), watch.id_of(whole.number))


def _changed(watch: ViewWatch, step: RowStep, changes: Iterable[RowChange]) -> StreamEvent:
    rows = [{"before": _json(each.before), "after": _json(each.after)} for each in changes]
    told = orjson.dumps({"token": step.token, "rows": rows})
    return StreamEvent("changed", told.decode(), watch.id_of(step.number))


def _json(row: SeenRow | None) -> orjson.Fragment | None:
    return None if row is None else orjson.Fragment(row.json)
