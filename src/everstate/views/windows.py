"""`window(ts, '1 hour')` in a definition: the windows of time that a row belongs to.

A tumbling window is a group like others: its start is computed from the time. With hopping windows
a row belongs to several: the plan gives a row for each of them. The windows are those of Spark:
[start, end), counted from 1970 in UTC; a row without a time belongs to none. A window that would
begin before the year 1 has no row, and an end after the year 9999 is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from sqlglot import exp, parse_one

from everstate.changes.moments import FIRST_US, LAST_US
from everstate.views.durations import microseconds
from everstate.views.grammar import Grammar, image_path, spark_text
from everstate.views.parsing import DIALECT

ENDS_AFTER: Final = "ends_after"
"""Key in a node's `meta`: the node is a window's start, and means its end, so much later."""
VARIABLE: Final = "window__"
"""Name of the variable with the start of one of several windows."""
_WORD: Final = "window"
_SIDES: Final = ("start", "end")
_WINDOWS_MAX: Final = 1000
_AFTER_ALL: Final = "10000-01-01 00:00:00+00"
_ADVICE: Final = "Write GROUP BY window(ts, '1 hour'), or window(ts, '1 hour', '15 minutes')."


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of one size that begin every ``slide``, both in microseconds."""

    time: exp.Expr
    size: int
    slide: int
    begin: int = 0

    @property
    def count(self) -> int:
        """Most windows in which a time may lie."""
        return -(-self.size // self.slide)

    def start(self) -> exp.Expr:
        """Spark's expression of the start of the window; with several windows, of one of them."""
        text = VARIABLE if self.count > 1 else _last(self, self.time.sql(dialect=DIALECT))
        return parse_one(f"TIMESTAMP_MICROS({text})", read=DIALECT)

    def starts(self, grammar: Grammar) -> str | None:
        """Canonical text of the starts of several windows; ``None``: a time is in only one."""
        if self.count == 1:
            return None
        time = spark_text(grammar.resolved(self.time, aggregates=False))
        last = _last(self, time)
        steps = f"TRANSFORM(SEQUENCE(0L, {self.count - 1}L), i -> {last} - i * {self.slide})"
        meant = f"i >= {FIRST_US}"
        if self.size % self.slide:
            meant += f" AND i + {self.size} > UNIX_MICROS({time})"
        return f"FILTER({steps}, i -> {meant})"

    def has_start(self) -> exp.Expr | None:
        """Spark's condition that a time lies in any window; ``None``: each time does."""
        if (FIRST_US - self.begin) % self.slide == 0:
            return None
        last = _last(self, self.time.sql(dialect=DIALECT))
        return parse_one(f"{last} >= {FIRST_US}", read=DIALECT)


def _last(windows: Windows, time: str) -> str:
    """The start of the last window that a time lies in."""
    since = f"UNIX_MICROS({time})"
    begin = f" - {windows.begin}" if windows.begin else ""
    return f"{since} - PMOD({since}{begin}, {windows.slide})"


def without_windows(grammar: Grammar) -> Windows | None:
    """Replace `window(…)` in a definition; ``None``: it has none. Raises InvalidView."""
    select = grammar.select
    calls = [n for n in select.find_all(exp.Anonymous) if n.name.lower() == _WORD]
    if not calls:
        return None
    if any(call != calls[0] for call in calls):
        grammar.refuse("a view can have only one kind of window", "Declare a view for each.")
    if any(call.find_ancestor(exp.Where) for call in calls):
        grammar.refuse("window(…) is not allowed in WHERE", "Compare the time itself.")
    windows = _windows(grammar, calls[0])
    if windows.count > 1:
        grammar.variables.add(VARIABLE)
    for call in calls:
        _replace(grammar, windows, call)
    for column in list(select.find_all(exp.Column)):
        if column.table.lower() == _WORD and column.name.lower() in _SIDES:
            _put(select, column, _side(windows, column.name.lower()))
    select.where(exp.Not(this=exp.Is(this=windows.time.copy(), expression=exp.Null())), copy=False)
    if (condition := windows.has_start()) is not None:
        select.where(condition, copy=False)
    return windows


def end_sql(start: str, size: int) -> str:
    """PostgreSQL's text of the end of a window; null after the year 9999, which Python lacks."""
    long = f"INTERVAL '{size} microseconds'"
    return f"CASE WHEN {start} < TIMESTAMPTZ '{_AFTER_ALL}' - {long} THEN {start} + {long} END"


def in_calendar(
    select: exp.Select, wanted: Sequence[tuple[str, exp.Expr]]
) -> tuple[exp.Select, list[tuple[str, exp.Expr]]]:
    """A definition and its outputs for Spark, which has windows out of the years 1 to 9999, too.

    As in what is stored, a window that begins before has no row, and an end after is null.
    """
    call = next((n for n in select.find_all(exp.Anonymous) if n.name.lower() == _WORD), None)
    if call is None:
        return select, list(wanted)
    sides = [(name, each, _side_of(each)) for name, each in wanted]
    ends = {name.lower(): place for place, (name, _, side) in enumerate(sides, 1) if side == "end"}
    copied = select.copy()
    start, end = (exp.column(side, table=_WORD) for side in _SIDES)
    begins = parse_one(f"UNIX_MICROS({start.sql()}) >= {FIRST_US}", read=DIALECT)
    copied.having(begins, copy=False)
    group = copied.args.get("group")
    if group is not None and group.args.get("all"):
        # Only a window in GROUP BY has a name in HAVING.
        groups = [call if side else each for _, each, side in sides if not each.find(exp.AggFunc)]
        copied.set("group", exp.Group(expressions=[each.copy() for each in dict.fromkeys(groups)]))
    order = copied.args.get("order")
    for term in [] if order is None else order.expressions:
        # An order by the end is one by the start, so it does not see that an end is null.
        by, name = term.this, term.this.name.lower()
        is_named = isinstance(by, exp.Column) and len(by.parts) == 1 and name in ends
        if is_named or (isinstance(by, exp.Literal) and name in map(str, ends.values())):
            term.set("this", end.copy())
    outputs = []
    for name, each, side in sides:
        if side == "end":
            is_there = parse_one(f"UNIX_MICROS({each.sql(dialect=DIALECT)}) <= {LAST_US}", DIALECT)
            each = exp.case().when(is_there, each.copy())
        outputs.append((name, each))
    return copied, outputs


def _side_of(node: exp.Expr) -> str | None:
    """Whether an output is the start or the end of a window; ``None``: it is neither."""
    node, name = node.unnest(), node.unnest().name.lower()
    head = node.this if isinstance(node, exp.Dot) else None
    is_call = isinstance(head, exp.Anonymous) and head.name.lower() == _WORD
    is_column = isinstance(node, exp.Column) and node.table.lower() == _WORD
    return name if (is_call or is_column) and name in _SIDES else None


def _replace(grammar: Grammar, windows: Windows, call: exp.Expr) -> None:
    parent = call.parent
    if isinstance(parent, exp.Dot) and parent.name.lower() in _SIDES:
        _put(grammar.select, parent, _side(windows, parent.name.lower()))
    elif isinstance(parent, exp.Group):
        call.replace(windows.start())
    else:
        grammar.refuse(
            "window(…) alone is not allowed as a column", "Write window.start and window.end."
        )


def _side(windows: Windows, side: str) -> exp.Expr:
    """The start of a window; for its end, with the window's size in `meta`."""
    found = exp.paren(windows.start())
    if side == "end":
        found.meta[ENDS_AFTER] = windows.size
    return found


def _put(select: exp.Select, node: exp.Expr, made: exp.Expr) -> None:
    """Replace a node by an expression, with the node's name if it is an output."""
    is_output = node.parent is select
    node.replace(exp.alias_(made, node.output_name, quoted=True) if is_output else made)


def _windows(grammar: Grammar, call: exp.Expr) -> Windows:
    if not grammar.select.args.get("group"):
        grammar.refuse("window(…) is allowed only in a view with GROUP BY", _ADVICE)
    time, *durations = call.expressions or [None]
    given = [_duration(grammar, each) for each in durations]
    if time is None or not 1 <= len(given) <= 3:
        grammar.refuse("window(…) needs a time and one to three durations", _ADVICE)
    size, slide, begin = [*given, given[0], 0][:3] if len(given) < 2 else [*given, 0][:3]
    if not 0 < slide <= size:
        grammar.refuse(
            "the second duration of window(…) must be more than 0 and at most as long as the first",
            _ADVICE,
        )
    path = image_path(grammar.resolved(time, aggregates=False))
    kind = None if path is None else grammar.type_of(path)
    if kind is not None and pa.types.is_timestamp(kind) and not kind.tz:
        text = time.sql(dialect=DIALECT)
        grammar.refuse(
            f"{text} is a local time, which is no instant",
            f"Write window(CAST({text} AS TIMESTAMP), …), which takes it as a time in UTC.",
        )
    found = Windows(time, size, slide, begin)
    if found.count > _WINDOWS_MAX:
        grammar.refuse(
            f"each row would be in {found.count:,} windows, and at most {_WINDOWS_MAX:,} are "
            "allowed",
            "Make the second duration longer.",
        )
    return found


def _duration(grammar: Grammar, node: exp.Expr) -> int:
    text = node.sql(dialect=DIALECT)
    written = node.name if isinstance(node, exp.Literal) else text
    found = microseconds(written)
    if found is None:
        grammar.refuse(
            f"{text} is not a duration of fixed length",
            "Write '1 hour', '15 minutes' or '7 days'. For months, which differ in length, write "
            "GROUP BY date_trunc('MONTH', ts).",
        )
    return found
