"""The changes of a view's rows, for any number of subscribers of this process.

A watch looks at the position of one view, and whenever it has moved reads all rows in one snapshot
and compares them with those before: what differs is one step, from one position to a later one.
This holds for every kind of view, since it needs no knowledge of which changes move which rows.
Cost: a statement or two every 250 ms while somebody follows the view; for each step a pass over
the view, with two encoded copies of its rows in memory; never more than a fifth of the time. So a
view of more than :data:`ROWS_MAX` rows is refused.

The watch remembers its newest steps. A subscriber only keeps the number of its last step: one that
was disconnected for a moment, or that is slow, takes the steps behind that number, and gets all
rows again when they are not remembered any more. So no subscriber needs a queue of its own.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from everstate.changes.row_json import row_json
from everstate.config import Config
from everstate.errors import MissingTable, NotFound, TooManyRows
from everstate.postgres import Connection, identifier
from everstate.serving.connection import pooled
from everstate.serving.places import check_here, published
from everstate.serving.shared_reader import SharedReader
from everstate.serving.snapshots import Standpoint, at_one_position
from everstate.serving.view_columns import ViewColumn, check_known, columns_of, key_of
from everstate.views.control import ViewStatuses
from everstate.views.project import Project
from everstate.views.tables import Row

ROWS_MAX: Final = 10_000
"""Most rows of a view that can be followed."""
_LOOK_S: Final = 0.25
_SHARE: Final = 4
"""A watch rests this many times as long as its last look took."""
_MEMORY_ROWS: Final = 20_000
_NUMBER: Final = re.compile("[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class SeenRow:
    """A row, and the same as JSON."""

    values: Row
    json: bytes


@dataclass(frozen=True, slots=True)
class RowChange:
    """A row before and after a step; ``None``: it was not there."""

    before: SeenRow | None
    after: SeenRow | None


@dataclass(frozen=True, slots=True)
class RowStep:
    """What differs between two positions of a view."""

    number: int
    token: str | None
    """The later position; ``None`` while throttled changes wait."""
    changes: Sequence[RowChange]


@dataclass(frozen=True, slots=True)
class WholeView:
    """All rows of a version of a view at one position."""

    number: int
    """Of the last step that is in them."""
    token: str | None
    version: int
    columns: Sequence[ViewColumn]
    key: Sequence[ViewColumn] | None
    rows: Mapping[Any, SeenRow]
    """By the values of the key, or the row itself and a number where there is none."""


class ViewWatch(SharedReader):
    """Watches one view while somebody follows it. Threads share it.

    To join it raises UnknownView, NotFound, TooManyRows and Unavailable. Cost: the first subscriber
    reads the view.
    """

    def __init__(self, config: Config, project: Project, view: str) -> None:
        super().__init__(f"view {view}")
        self._config, self._project, self._view = config, project, view
        plan = project.views.get(view)
        self._is_ruled = plan is not None and bool(plan.rules)
        """Deferred changes are applied later, without a new position."""
        self._name: Final = secrets.token_hex(4)
        """In the ids of its steps: another watch, after a restart, has other steps."""
        self._steps: deque[RowStep] = deque()
        self._remembered = 0
        """Number of the step after which all steps are remembered."""
        self._whole: WholeView | None = None
        self._mark: object = None

    def whole(self) -> WholeView:
        """All rows as they were seen last."""
        with self._lock:
            assert self._whole is not None, "somebody has joined"
            return self._whole

    def id_of(self, number: int) -> str:
        """The id of a step, by which a subscriber continues after it."""
        return f"{self._name}-{number}"

    def number_of(self, step_id: str) -> int | None:
        """The number of a step; ``None``: it is of another watch."""
        name, _, number = step_id.partition("-")
        return int(number) if name == self._name and _NUMBER.fullmatch(number) else None

    def behind(self, number: int) -> list[RowStep] | None:
        """The steps after a number; ``None``: some are forgotten."""
        with self._lock:
            assert self._whole is not None, "somebody has joined"
            if not self._remembered <= number <= self._whole.number:
                return None
            return [step for step in self._steps if step.number > number]

    def _open(self) -> None:
        check_known(self._project, self._view)
        # The first look reads again: the position may move before it is looked at.
        self._take(self._rows(0))

    def _read(self) -> float:
        began = time.monotonic()
        self._look()
        return max(_LOOK_S, _SHARE * (time.monotonic() - began))

    def _leave_source(self) -> None:
        """A look ends by itself."""

    def _look(self) -> None:
        """Read the rows if the position moved, and return what differs."""
        mark = self._marked()
        if mark == self._mark and not self._is_ruled:
            return
        found = self._rows(self.whole().number)
        self._mark = mark
        self._take(found)

    def _take(self, found: WholeView) -> None:
        with self._lock:
            before = self._whole
            number = found.number
            if before is not None and before.version != found.version:
                # Of another version no row is compared: every subscriber gets all rows again.
                number += 1
                self._steps.clear()
                self._remembered = number
            elif before is not None and (changes := _changed(before.rows, found.rows)):
                number += 1
                self._remember(RowStep(number, found.token, changes))
            self._whole = WholeView(
                number, found.token, found.version, found.columns, found.key, found.rows
            )
        if before is not None and number != before.number:
            self._wake_all()

    def _remember(self, step: RowStep) -> None:
        self._steps.append(step)
        count = sum(len(each.changes) for each in self._steps)
        while count > _MEMORY_ROWS and len(self._steps) > 1:
            oldest = self._steps.popleft()
            count -= len(oldest.changes)
            self._remembered = oldest.number

    def _marked(self) -> object:
        """What differs whenever the view was changed."""
        try:
            with pooled(self._config.views_dsn) as connection:
                control = ViewStatuses(connection, self._config.views.schema_name)
                row = published(control, self._project, self._view)
                names = row.inputs or (row.name,)
                places = [
                    (each.view, each.version, each.generation, each.partition, each.next_offset)
                    for each in control.positions()
                    if each.view in names
                ]
                waits = {at: each for at, each in control.deferred().items() if at[0] in names}
        except MissingTable as cause:
            raise NotFound(f"view {self._view} does not exist any more.") from cause
        return row.version, row.published_at, row.built, places, waits

    def _rows(self, number: int) -> WholeView:
        schema = self._config.views.schema_name

        def read(connection: Connection, standpoint: Standpoint) -> tuple[Any, ...]:
            check_here(standpoint.version)
            columns = columns_of(connection, schema, self._view).get(self._view, [])
            names = ", ".join(identifier(column.name) for column in columns)
            query = f"SELECT {names} FROM {identifier(schema, self._view)} LIMIT %s".encode()
            rows = connection.execute(query, (ROWS_MAX + 1,), prepare=False, binary=True).fetchall()
            return standpoint, columns, rows

        standpoint, columns, rows = at_one_position(self._config, self._project, self._view, read)
        if len(rows) > ROWS_MAX:
            raise TooManyRows(self._view, ROWS_MAX)
        version = standpoint.version
        key = key_of(self._project, self._view, version, columns)
        by_key = _by_key(columns, key, rows)
        return WholeView(number, standpoint.token, version.version, columns, key, by_key)


def _by_key(
    columns: Sequence[ViewColumn], key: Sequence[ViewColumn] | None, rows: Sequence[Row]
) -> dict[Any, SeenRow]:
    names = [column.name for column in columns]
    places = None if key is None else [names.index(column.name) for column in key]
    found: dict[Any, SeenRow] = {}
    alike: dict[bytes, int] = {}
    for row in rows:
        seen = SeenRow(row, row_json(dict(zip(names, row, strict=True))))
        if places is not None:
            found[tuple(row[place] for place in places)] = seen
        else:
            alike[seen.json] = number = alike.get(seen.json, 0) + 1
            found[seen.json, number] = seen
    return found


def _changed(before: Mapping[Any, SeenRow], after: Mapping[Any, SeenRow]) -> list[RowChange]:
    """The rows that differ."""
    found = [
        RowChange(row, after.get(key))
        for key, row in before.items()
        if key not in after or after[key].json != row.json
    ]
    return found + [RowChange(None, row) for key, row in after.items() if key not in before]
