"""Views of every kind over sales at random, each with an oracle that shares no code with them.

DuckDB runs a definition on what is alive; where it has no word for something, or another meaning,
the case has a fold in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from random import Random
from typing import Any

import pyarrow as pa
from pydantic import BaseModel

from everstate.changes import EntityType
from everstate.views.definition import (
    Definition,
    PythonDefinition,
    TimelineDefinition,
    ViewDefinition,
)
from kinds_rig import Step, Story, story
from view_fuzz import Sale, histories

Rows = Sequence[tuple[Any, ...]]


class Shop(BaseModel):
    """What a sale is joined with."""

    code: str
    city: str | None
    size: int


SHOP = EntityType("shop", Shop, "code")


@dataclass(frozen=True)
class Case:
    """A declaration and what must be read of it."""

    name: str
    sql: str
    options: dict[str, Any] = field(default_factory=dict)
    oracle: str | Callable[[Story], Rows] | None = None
    """SQL of DuckDB over `sale` and `shop`, or a fold of the sales; ``None``: the definition."""
    ordered: bool = False
    """Whether rows must come in the oracle's order."""
    reads: str | None = None
    """How it is read; ``None``: all of it."""

    @property
    def definition(self) -> Definition:
        """What is declared."""
        if (function := self.options.get("function")) is not None:
            return PythonDefinition(self.name, "sale", function, self.options["columns"])
        if self.sql:
            return ViewDefinition(self.name, self.sql, **self.options)
        return TimelineDefinition(self.name, "sale", self.options["attributes"])


def shop_story(random: Random, changes: int | None = None) -> Story:
    """Some shops, as they open, move and close."""
    states: list[tuple[str, BaseModel | None]] = []
    for _ in range(changes or random.randint(1, 12)):
        code = random.choice(("a", "b", "A", "c"))
        shop = Shop(code=code, city=random.choice((None, "x", "y")), size=random.randint(0, 3))
        states.append((code, None if random.random() < 0.2 else shop))
    return story(random, "shop", states)


def sale_story(random: Random, changes: int | None = None, *, keys: int | None = None) -> Story:
    """Some sales, as they are made, changed and deleted."""
    keys, changes = keys or random.randint(2, 8), changes or random.randint(5, 40)
    return story(random, "sale", histories(random, keys, changes))


def sales(told: Story) -> list[Sale]:
    """What is alive at the end."""
    return [state for state in told.alive.values() if isinstance(state, Sale)]


def _in_places(places: int) -> Callable[[Story], Rows]:
    """Sums of `ratio` per region in so many decimal places."""

    def fold(told: Story) -> Rows:
        found: dict[str | None, list[Decimal]] = {}
        for sale in sales(told):
            if sale.ratio is None or abs(sale.ratio) < 1000:
                group = found.setdefault(sale.region, [])
                if sale.ratio is not None:
                    exact = Decimal(repr(sale.ratio)).quantize(Decimal(1).scaleb(-places))
                    assert exact == Decimal(repr(sale.ratio)).quantize(
                        Decimal(1).scaleb(-places), ROUND_HALF_UP
                    )
                    group.append(exact)
        return [
            (region, sum(each), sum(each) / len(each)) if each else (region, None, None)
            for region, each in found.items()
        ]

    return fold


VALUES = (
    Case(
        "extremes",
        "SELECT region, count(*) AS n, max(quantity) AS most, min(price) AS least, "
        "max(day) AS last, min(shop) AS first_shop, max(ratio) AS ratio, max(paid) AS paid, "
        "min(moment) AS moment FROM sale GROUP BY region",
    ),
    Case(
        "different",
        "SELECT shop, paid, count(DISTINCT region) AS regions, count(DISTINCT ratio) AS ratios, "
        "count(DISTINCT big % 3) AS bigs, sum(quantity) AS q FROM sale GROUP BY shop, paid",
    ),
    Case(
        "overall",
        "SELECT max(quantity) - min(quantity) AS spread, count(DISTINCT place.city) AS cities, "
        "max(region) AS region FROM sale WHERE quantity > 0",
    ),
    Case(
        "filtered",
        "SELECT shop, max(quantity) FILTER (WHERE paid) AS most, sum(price) AS price "
        "FROM sale GROUP BY shop HAVING count(*) > 1 AND max(quantity) > 0",
    ),
)
SHOWN = (
    Case(
        "top_regions",
        "SELECT region, count(*) AS n, sum(quantity) AS q FROM sale GROUP BY region "
        "ORDER BY n DESC, q LIMIT 2",
        oracle="SELECT region, count(*) AS n, sum(quantity) AS q FROM sale GROUP BY region "
        "ORDER BY n DESC, q NULLS FIRST, region NULLS FIRST LIMIT 2",
        ordered=True,
    ),
    Case(
        "after_the_first",
        "SELECT shop, max(quantity) AS most FROM sale GROUP BY shop HAVING sum(quantity) > -100 "
        "ORDER BY most LIMIT 5 OFFSET 1",
        oracle="SELECT shop, max(quantity) AS most FROM sale GROUP BY shop "
        "HAVING sum(quantity) > -100 ORDER BY most NULLS FIRST, shop LIMIT 5 OFFSET 1",
        ordered=True,
    ),
    Case(
        "dearest",
        "SELECT sale_id, price FROM sale WHERE quantity IS NOT NULL "
        "ORDER BY price DESC, quantity LIMIT 3",
        oracle="SELECT sale_id, price FROM sale WHERE quantity IS NOT NULL "
        "ORDER BY price DESC NULLS LAST, quantity, sale_id LIMIT 3",
        ordered=True,
    ),
    Case(
        "by_name",
        "SELECT upper(region) AS region, day FROM sale ORDER BY region, ratio DESC",
        oracle="SELECT upper(region) AS region, day FROM sale "
        "ORDER BY upper(region) NULLS FIRST, ratio DESC NULLS LAST, sale_id DESC",
        ordered=True,
    ),
)
SCALED = (
    Case(
        "ratios",
        "SELECT region, sum(ratio) AS total, avg(ratio) AS mean FROM sale "
        "WHERE ratio IS NULL OR abs(ratio) < 1000 GROUP BY region",
        {"scale": 3},
        oracle=_in_places(3),
    ),
)

LAST = (
    Case(
        "dearest_of_shop",
        "SELECT sale_id, price, row_number() OVER (PARTITION BY shop ORDER BY price DESC, day) "
        "AS rank FROM sale WHERE quantity IS NOT NULL QUALIFY rank <= 2",
        oracle="SELECT sale_id, price, row_number() OVER (PARTITION BY shop ORDER BY price DESC "
        "NULLS LAST, day NULLS FIRST, sale_id) AS rank FROM sale WHERE quantity IS NOT NULL "
        "QUALIFY rank <= 2",
    ),
    Case(
        "newest_of_region",
        "SELECT region, moment, sale_id FROM sale QUALIFY row_number() OVER "
        "(PARTITION BY region, paid ORDER BY moment DESC) = 1 ORDER BY sale_id",
        oracle="SELECT region, moment, sale_id FROM sale QUALIFY row_number() OVER (PARTITION BY "
        "region, paid ORDER BY moment DESC NULLS LAST, sale_id DESC) = 1 ORDER BY sale_id",
        ordered=True,
    ),
    Case(
        "under_the_names_of_columns",
        "SELECT upper(shop) AS shop, sale_id, -quantity AS quantity, row_number() OVER "
        "(PARTITION BY shop ORDER BY quantity DESC) AS number FROM sale QUALIFY number <= 2 "
        "ORDER BY 3, sale_id LIMIT 3",
        oracle="SELECT upper(shop) AS name, sale_id, -quantity AS less, row_number() OVER "
        "(PARTITION BY shop ORDER BY quantity DESC NULLS LAST, sale_id DESC) AS number FROM sale "
        "QUALIFY number <= 2 ORDER BY less NULLS FIRST, sale_id LIMIT 3",
        ordered=True,
    ),
)

HOUR = timedelta(hours=1)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def floor(moment: datetime, size: timedelta) -> datetime:
    """The start of the window that a moment lies in."""
    return moment - (moment - EPOCH) % size


CALENDAR = (datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC))


def _windows_of(
    moment: datetime | None, size: timedelta, slide: timedelta
) -> list[tuple[datetime, datetime | None]]:
    """The windows that begin in the calendar; an end after it is null."""
    if moment is None:
        return []
    first, last = (each - EPOCH for each in CALENDAR)
    since, found = moment - EPOCH, []
    start = since - since % slide
    while start + size > since:
        if start >= first:
            end = EPOCH + start + size if start + size <= last else None
            found.append((EPOCH + start, end))
        start -= slide
    return found


def _in_windows(size: timedelta, slide: timedelta) -> Callable[[Story], Rows]:
    """Start, end, count and largest quantity of each window over what is alive."""

    def fold(told: Story) -> Rows:
        found: dict[tuple[datetime, datetime | None], list[int | None]] = {}
        for sale in sales(told):
            for window in _windows_of(sale.moment, size, slide):
                found.setdefault(window, []).append(sale.quantity)
        return [
            (*window, len(each), max((q for q in each if q is not None), default=None))
            for window, each in found.items()
        ]

    return fold


WINDOWS = (
    Case(
        "by_hour",
        "SELECT window.start AS start, window.end AS till, count(*) AS n, max(quantity) AS most "
        "FROM sale GROUP BY window(moment, '1 hour')",
        oracle=_in_windows(HOUR, HOUR),
    ),
    Case(
        "hopping",
        "SELECT window(moment, '1 hour', '25 minutes').start AS start, "
        "window(moment, '1 hour', '25 minutes').end AS till, count(*) AS n, max(quantity) AS most "
        "FROM sale GROUP BY window(moment, '1 hour', '25 minutes')",
        oracle=_in_windows(HOUR, timedelta(minutes=25)),
    ),
    Case(
        "hopping_sums",
        "SELECT window.start AS start, shop, sum(quantity) AS q FROM sale "
        "GROUP BY window(moment, '2 days', '1 day'), shop",
        oracle=lambda told: _hopping_sums(told),
    ),
    Case(
        "by_week",
        "SELECT window.end AS till, count(*) AS n, max(quantity) AS most "
        "FROM sale GROUP BY window(moment, '7 days') ORDER BY till DESC",
        oracle=lambda told: [
            row[1:]
            for row in sorted(
                _in_windows(timedelta(days=7), timedelta(days=7))(told),
                key=lambda row: row[0],
                reverse=True,
            )
        ],
        ordered=True,
    ),
)


def _hopping_sums(told: Story) -> Rows:
    day, found = timedelta(days=1), dict[tuple[datetime, str], list[int | None]]()
    for sale in sales(told):
        for start, _ in _windows_of(sale.moment, 2 * day, day):
            found.setdefault((start, sale.shop), []).append(sale.quantity)
    return [(start, shop, _sum(each)) for (start, shop), each in found.items()]


def _sum(values: Sequence[int | None]) -> int | None:
    present = [value for value in values if value is not None]
    return sum(present) if present else None


def _after(step: Step) -> Sale | None:
    return step.current if isinstance(step.current, Sale) else None


def _shop_changes(told: Story) -> Rows:
    found: dict[tuple[str, str | None], list[Step]] = {}
    for step in told.steps:
        after = _after(step)
        shop = None if after is None else after.shop
        found.setdefault((step.kind.value, shop), []).append(step)
    rows = []
    for (kind, shop), steps in found.items():
        states = [after for step in steps if (after := _after(step)) is not None]
        more = [
            step.current.quantity - step.original.quantity
            for step in steps
            if isinstance(step.current, Sale)
            and isinstance(step.original, Sale)
            and step.current.quantity is not None
            and step.original.quantity is not None
        ]
        ratios = [state.ratio for state in states if state.ratio is not None]
        regions = {state.region for state in states if state.region is not None}
        times = [step.occurred_at for step in steps]
        extremes = max(times), min(times), max(ratios, default=None)
        most = [s.quantity for s in states if kind == "updated" and s.quantity is not None]
        counted = sum(more) if more else None, max(most, default=None)
        paid = min((s.paid for s in states if s.paid is not None), default=None)
        rows.append((kind, shop, len(steps), *extremes, len(regions), *counted, paid))
    return rows


LATENESS = timedelta(minutes=10)


def is_late(step: Step) -> bool:
    """Whether it was recorded much later than it happened."""
    return step.recorded_at - step.occurred_at > LATENESS


def _hours(told: Story) -> dict[datetime, list[Step]]:
    found: dict[datetime, list[Step]] = {}
    for step in told.steps:
        if _after(step) is not None:
            found.setdefault(floor(step.occurred_at, HOUR), []).append(step)
    return found


def _quantities(steps: Sequence[Step]) -> int | None:
    return _sum([after.quantity for step in steps if (after := _after(step)) is not None])


def _with_late(told: Story) -> Rows:
    rows = []
    for start, steps in _hours(told).items():
        fresh = [step for step in steps if not is_late(step)]
        rows.append((start, len(fresh), _quantities(fresh), len(steps) - len(fresh)))
    return rows


def _without_late(told: Story) -> Rows:
    hours = {start: [s for s in steps if not is_late(s)] for start, steps in _hours(told).items()}
    return [(start, len(steps), _quantities(steps)) for start, steps in hours.items() if steps]


def _set_aside(told: Story) -> Rows:
    return [
        (step.key, step.version, step.occurred_at)
        for step in told.steps
        if is_late(step) and _after(step) is not None
    ]


_BY_HOUR = (
    "SELECT window.start AS start, count(*) AS n, sum(quantity) AS q FROM sale_changes "
    "WHERE kind <> 'deleted' GROUP BY window(occurred_at, '1 hour')"
)
CHANGES = (
    Case(
        "shop_changes",
        "SELECT kind, shop, count(*) AS n, max(occurred_at) AS last, min(occurred_at) AS first, "
        "max(ratio) AS ratio, count(DISTINCT current.region) AS regions, "
        "sum(current.quantity - original.quantity) AS more, "
        "max(current.quantity) FILTER (WHERE kind = 'updated') AS most, min(paid) AS paid "
        "FROM sale_changes GROUP BY kind, shop",
        oracle=_shop_changes,
    ),
    Case(
        "moves",
        "SELECT key, version, provenance.serviceName AS who, original.shop AS was, shop AS now "
        "FROM sale_changes WHERE NOT (original.shop <=> current.shop)",
        oracle=lambda told: [
            (step.key, step.version, step.service, before, after)
            for step in told.steps
            if (before := step.original.shop if isinstance(step.original, Sale) else None)
            != (after := step.current.shop if isinstance(step.current, Sale) else None)
        ],
    ),
    Case(
        "newest",
        "SELECT key, version, kind FROM sale_changes ORDER BY recorded_at DESC LIMIT 5",
        oracle=lambda told: [
            (step.key, step.version, step.kind.value)
            for step in sorted(
                told.steps, key=lambda s: (s.recorded_at, s.key, s.version), reverse=True
            )[:5]
        ],
        ordered=True,
    ),
    Case(
        "counted_late",
        _BY_HOUR,
        {"lateness": "10 minutes", "late": "count"},
        oracle=_with_late,
    ),
    Case("aside", _BY_HOUR, {"lateness": "10 minutes", "late": "aside"}, oracle=_without_late),
    Case(
        "aside_late",
        "SELECT key, version, occurred_at FROM sale_changes WHERE kind <> 'deleted' AND "
        "NOT (UNIX_MICROS(recorded_at) - UNIX_MICROS(occurred_at) <= 600000000)",
        oracle=_set_aside,
    ),
)

SEARCHED = (
    Case(
        "found",
        "SELECT sale_id, region, concat_ws(' ', shop, place.city) AS words FROM sale "
        "WHERE quantity IS NULL OR quantity < 5",
        {"search": ("region", "words"), "indexes": (("region",),)},
        oracle=lambda told: [
            (sale.sale_id, sale.region)
            for sale in sales(told)
            if (sale.quantity is None or sale.quantity < 5)
            and (sale.region or "").lower().strip() == "north"
            and sale.shop != "b"
        ],
        reads="SELECT sale_id, region FROM found "
        "WHERE _words @@ websearch_to_tsquery('simple', 'north -b')",
    ),
)
TTL = timedelta(minutes=90)


def _active(told: Story) -> Rows:
    """Paid sales that changed within the time to live, and when they did last."""
    latest: dict[str, datetime] = {}
    for step in told.steps:
        moment = min(step.occurred_at, step.recorded_at)
        latest[step.key] = max(moment, latest.get(step.key, moment))
    now = max(latest.values(), default=None)
    return [
        (sale.sale_id, sale.region, latest[sale.sale_id])
        for sale in sales(told)
        if sale.paid and now is not None and latest[sale.sale_id] > now - TTL
    ]


CACHED = (
    Case(
        "active",
        "SELECT sale_id, region FROM sale WHERE paid",
        {"ttl": "90 minutes"},
        oracle=_active,
        reads="SELECT sale_id, region, _active_at FROM active",
    ),
)


def _timeline(told: Story) -> Rows:
    """Runs of equal values of shop and city, with who began them."""
    rows: list[list[Any]] = []
    runs: dict[str, list[Any]] = {}
    times: dict[str, datetime] = {}
    for step in told.steps:
        times[step.key] = max(step.occurred_at, times.get(step.key, step.occurred_at))
        after = _after(step)
        now = None if after is None else (after.shop, after.place.city)
        run = runs.get(step.key)
        if run is not None and now != (run[1], run[2]):
            run[4] = times[step.key]
            run = runs.pop(step.key)
        if now is not None and step.key not in runs:
            run = [step.key, *now, times[step.key], None, step.service, f"r{step.version}"]
            runs[step.key] = [*run, step.version]
            rows.append(runs[step.key])
    return [tuple(row) for row in rows]


TIMELINES = (
    Case(
        "shops_over_time",
        "",
        {"attributes": ("shop", "place.city")},
        oracle=_timeline,
        reads='SELECT key, shop, "place.city", valid_from, valid_to, changed_by, reason, version '
        "FROM shops_over_time",
    ),
)
JOINS = (
    Case(
        "with_shop",
        "SELECT s.sale_id, s.price, h.city, s.quantity * h.size AS worth, upper(s.region) AS r "
        "FROM sale s JOIN shop h ON s.shop = h.code WHERE s.quantity > 0 AND h.size > 0",
    ),
    Case(
        "maybe_with_shop",
        "SELECT sale_id, h.city, coalesce(h.city, 'none') AS known FROM sale "
        "LEFT JOIN shop h ON shop = code AND h.size > 1 AND paid "
        "WHERE h.city IS NULL OR quantity > h.size",
    ),
    Case(
        "with_shop_by_conditions",
        "SELECT sale_id, h.city, CASE WHEN h.size > 1 THEN region END AS r FROM sale LEFT JOIN "
        "shop h ON shop = code AND region <> 'north' WHERE h.size > 1 OR quantity + 1 > 2",
    ),
    Case(
        "dearest_with_shop",
        "SELECT s.sale_id, h.size FROM sale s JOIN shop h ON s.shop = h.code AND s.quantity > 0 "
        "ORDER BY s.price DESC, h.size LIMIT 3",
        oracle="SELECT s.sale_id, h.size FROM sale s JOIN shop h ON s.shop = h.code AND "
        "s.quantity > 0 ORDER BY s.price DESC NULLS LAST, h.size, s.sale_id, h.code LIMIT 3",
        ordered=True,
    ),
)
JOIN_SUMS = (
    Case(
        "sums_under_names_of_columns",
        "SELECT h.city AS a0, sum(s.quantity) AS n, count(*) AS c FROM sale s JOIN shop h "
        "ON s.shop = h.code GROUP BY h.city ORDER BY c DESC LIMIT 1",
        oracle="SELECT h.city, sum(s.quantity) AS q, count(*) AS c FROM sale s JOIN shop h "
        "ON s.shop = h.code GROUP BY h.city ORDER BY c DESC, h.city DESC NULLS LAST LIMIT 1",
        ordered=True,
    ),
    Case(
        "by_city",
        "SELECT h.city, count(*) AS n, sum(s.price) AS price, avg(s.quantity * h.size) AS worth, "
        "count(region) AS regions FROM sale s JOIN shop h ON s.shop = h.code WHERE h.size > 0 "
        "GROUP BY h.city HAVING count(*) > 1",
    ),
    Case(
        "by_size_and_region",
        "SELECT h.size, s.region, count(*) AS n, sum(h.size) AS sizes, sum(s.quantity) AS q "
        "FROM sale s LEFT JOIN shop h ON s.region = h.code AND s.paid GROUP BY h.size, s.region",
    ),
    Case(
        "joined_at_all",
        "SELECT count(*) AS n, sum(quantity) AS q FROM sale JOIN shop ON shop = code",
    ),
)


def stays(changes: pa.Table) -> pa.Table:
    """For each sale the shops that it was in, in order, with how often it changed there."""
    found: list[dict[str, Any]] = []
    for row in changes.to_pylist():
        shop = None if row["current"] is None else row["current"]["shop"]
        before = None if row["original"] is None else row["original"]["shop"]
        if shop is None:
            continue
        if shop != before or not found:
            found.append({"key": row["key"], "shop": shop, "times": 0, "price": None})
        found[-1] |= {"times": found[-1]["times"] + 1, "price": row["current"]["price"]}
    return pa.Table.from_pylist(found, schema=pa.schema([("key", pa.string()), *STAYS]))


STAYS = (
    pa.field("shop", pa.string()),
    pa.field("times", pa.int64()),
    pa.field("price", pa.decimal128(12, 2)),
)


def _stays(told: Story) -> Rows:
    rows: list[list[Any]] = []
    runs: dict[str, list[Any]] = {}
    for step in told.steps:
        after = _after(step)
        run = runs.get(step.key)
        if after is None:
            runs.pop(step.key, None)
            continue
        if run is None or run[1] != after.shop:
            run = runs[step.key] = [step.key, after.shop, 0, None]
            rows.append(run)
        run[2:] = [run[2] + 1, after.price]
    return [tuple(row) for row in rows]


PYTHON = (
    Case(
        "stays",
        "",
        {"function": stays, "columns": STAYS},
        oracle=_stays,
        reads="SELECT _key, shop, times, price FROM stays",
    ),
)
