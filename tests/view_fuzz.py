"""Views made at random within the grammar, and states to keep them of: one seed, one case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from random import Random
from typing import Annotated, Any

from pydantic import BaseModel, Field

from everstate.changes import EntityType


class Place(BaseModel):
    city: str
    floor: int | None = None


class Sale(BaseModel):
    """A field of each kind; ``big`` takes what 64 bits can hold."""

    sale_id: str
    region: str | None
    shop: str
    quantity: int | None
    big: int | None
    price: Annotated[Decimal, Field(max_digits=12, decimal_places=2)] | None
    ratio: float | None
    paid: bool | None
    day: date | None
    moment: datetime | None
    place: Place


SALE = EntityType("sale", Sale, "sale_id")

_REGIONS = (None, "", "north", "North", "now", "ü", "a'b", "a\\b", "%s", " north")
_DAYS = (None, date(1, 1, 1), date(2026, 2, 28), date(2024, 2, 29), date(9999, 12, 31))
_MOMENTS = (
    None,
    datetime(1, 1, 1, tzinfo=UTC),
    datetime(2026, 3, 29, 1, 30, tzinfo=UTC),
    datetime(2026, 3, 29, 23, 59, 59, 999999, tzinfo=UTC),
    datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
)
_RATIOS = (None, 0.0, -0.0, 0.1, -1.5, 1e300, 5e-324)
_BIG = (None, 0, -1, 2**63 - 1, -(2**63))


def sale(random: Random, key: str) -> Sale:
    """A state that is likely to share its groups with others."""
    pick = random.choice
    return Sale(
        sale_id=key,
        region=pick(_REGIONS),
        shop=pick(("a", "b", "A")),
        quantity=pick((None, 0, -3, 1, 2, 7)),
        big=pick(_BIG),
        price=pick((None, Decimal("0.00"), Decimal("-0.01"), Decimal("9999999999.99"))),
        ratio=pick(_RATIOS),
        paid=pick((None, True, False)),
        day=pick(_DAYS),
        moment=pick(_MOMENTS),
        place=Place(city=pick(("x", "y")), floor=pick((None, -1, 3))),
    )


def histories(random: Random, keys: int, changes: int) -> list[tuple[str, Sale | None]]:
    """Key and new state of each change, ``None`` for a deletion; keys come in any order."""
    found: list[tuple[str, Sale | None]] = []
    alive: set[str] = set()
    for _ in range(changes):
        key = f"k{random.randrange(keys)}"
        if key in alive and random.random() < 0.2:
            alive.remove(key)
            found.append((key, None))
        else:
            alive.add(key)
            found.append((key, sale(random, key)))
    return found


class Writer:
    """Writes SQL of the grammar; expressions have a kind, and no more than some depth."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def linear(self) -> str:
        """A view of sums and counts, with groups or without."""
        groups = self._random.sample(_GROUPS, self._random.randrange(4))
        columns = [f"{text} AS c{place}" for place, text in enumerate(groups)]
        columns += [f"{self._output(2)} AS o{place}" for place in range(self._random.randint(1, 4))]
        self._random.shuffle(columns)
        query = f"SELECT {', '.join(columns)} FROM sale{self._where()}"
        return f"{query} GROUP BY {', '.join(groups)}" if groups else query

    def values(self) -> str:
        """A view that also has maxima, minima and distinct counts, and a condition on groups."""
        groups = self._random.sample(_GROUPS, self._random.randrange(1, 4))
        columns = [f"{text} AS c{place}" for place, text in enumerate(groups)]
        columns += [f"{self._value()} AS v{n}" for n in range(self._random.randint(1, 3))]
        columns += [f"{self.aggregate()} AS o{n}" for n in range(self._random.randrange(2))]
        having = self._one(
            lambda: "",
            lambda: " HAVING count(*) > 1",
            lambda: " HAVING sum(quantity) IS NOT NULL",
            lambda: " HAVING max(quantity) > min(quantity) OR count(DISTINCT shop) = 1",
        )
        query = f"SELECT {', '.join(columns)} FROM sale{self._where()}"
        return f"{query} GROUP BY {', '.join(groups)}{having}"

    def _value(self) -> str:
        made = self._one(
            lambda: f"max({self.number(2)})",
            lambda: f"min({self.number(1)})",
            lambda: f"max({self.text(1)})",
            lambda: f"count(DISTINCT {self.text(1)})",
            lambda: f"count(DISTINCT {self.number(1)})",
            lambda: f"{self._random.choice(('max', 'min'))}({self._random.choice(_VALUES)})",
        )
        if self._random.random() < 0.2:
            made += f" FILTER (WHERE {self.boolean(1)})"
        return made

    def last(self) -> str:
        """The first rows of each category."""
        order = f"{self._random.choice(_VALUES)} {self._random.choice(('ASC', 'DESC'))}"
        category = ", ".join(self._random.sample(_CATEGORIES, self._random.randint(1, 2)))
        return (
            f"SELECT sale_id, {self.number(2)} AS n, region FROM sale{self._where()} QUALIFY "
            f"row_number() OVER (PARTITION BY {category} ORDER BY {order}, sale_id) <= "
            f"{self._random.randint(1, 3)}"
        )

    def join(self) -> str:
        """Sales with their shops, in rows or in groups."""
        how, on = self._random.choice(("JOIN", "LEFT JOIN")), self._random.choice(_MEET)
        of_rows = f"SELECT sale_id, city, {self.number(1)} AS n, size * quantity AS worth"
        of_groups = f"SELECT city, count(*) AS n, sum({self.number(1)}) AS s, avg(size) AS size"
        is_of_rows = self._random.random() < 0.5
        if not is_of_rows and how == "LEFT JOIN":
            on += " AND quantity > 0"
        query = f"{of_rows if is_of_rows else of_groups} FROM sale {how} shop ON {on}"
        wheres = ["", " WHERE quantity > 0", " WHERE paid"]
        if is_of_rows or how == "JOIN":
            wheres.append(" WHERE size > 0 AND paid")
        where = self._random.choice(wheres)
        return f"{query}{where}" if is_of_rows else f"{query}{where} GROUP BY city"

    def row(self) -> str:
        """A view of one row an entity."""
        made = [self.number, self.text, self.boolean]
        columns = [f"{self._random.choice(made)(3)} AS c{n}" for n in range(4)]
        plain = self._random.sample(_PLAIN, 2)
        return f"SELECT {', '.join([*plain, *columns])} FROM sale{self._where()}"

    def _where(self) -> str:
        return f" WHERE {self.boolean(2)}" if self._random.random() < 0.5 else ""

    def _one(self, *makers: Callable[[], str]) -> str:
        return self._random.choice(makers)()

    def number(self, depth: int) -> str:
        """An exact number that stays small."""
        plain = self._random.choice(("quantity", "place.floor", "price", "2", "-1", "0.5"))
        if not depth:
            return plain
        inner = depth - 1
        return self._one(
            lambda: plain,
            lambda: f"({self.number(inner)} + {self.number(inner)})",
            lambda: f"({self.number(inner)} - {self.number(inner)})",
            lambda: f"abs({self.number(inner)})",
            lambda: f"coalesce({self.number(inner)}, 0)",
            lambda: f"nullif({self.number(inner)}, 2)",
            lambda: f"if({self.boolean(inner)}, {self.number(inner)}, {self.number(inner)})",
            lambda: f"CASE WHEN {self.boolean(inner)} THEN {self.number(inner)} END",
            lambda: f"length({self.text(inner)})",
        )

    def text(self, depth: int) -> str:
        """A text."""
        plain = self._random.choice(("region", "shop", "place.city", "'now'", "'a\\'b'", "''"))
        if not depth or plain.startswith("'"):
            return plain if depth else self._random.choice(("region", "shop", "place.city"))
        inner = depth - 1
        return self._one(
            lambda: plain,
            lambda: f"upper({self.text(inner)})",
            lambda: f"coalesce({self.text(inner)}, 'none')",
            lambda: f"substring({plain}, 2, 2)",
            lambda: f"({plain} || '-' || {self.text(0)})",
            lambda: f"CASE {plain} WHEN 'north' THEN 'N' WHEN 'a' THEN NULL ELSE shop END",
        )

    def boolean(self, depth: int) -> str:
        """A condition."""
        if not depth:
            return self._random.choice(("paid", "quantity > 1", "region IS NULL", "shop = 'a'"))
        inner = depth - 1
        return self._one(
            lambda: "paid",
            lambda: f"({self.boolean(inner)} AND {self.boolean(inner)})",
            lambda: f"({self.boolean(inner)} OR {self.boolean(inner)})",
            lambda: f"(NOT {self.boolean(inner)})",
            lambda: f"({self.number(inner)} < {self.number(inner)})",
            lambda: f"({self.number(inner)} BETWEEN -1 AND {self.number(inner)})",
            lambda: f"({self.text(inner)} = {self.text(inner)})",
            lambda: "(region IN ('north', 'now', 'ü'))",
            lambda: "(region LIKE 'n%')",
            lambda: "(day >= DATE '2026-01-01')",
            lambda: "(moment < TIMESTAMP '2026-03-29 12:00:00')",
            lambda: f"({self.text(inner)} IS NOT NULL)",
        )

    def aggregate(self) -> str:
        """A count, a sum or an average."""
        made = self._one(
            lambda: "count(*)",
            lambda: f"count({self.text(1)})",
            lambda: f"count_if({self.boolean(1)})",
            lambda: f"sum({self.number(2)})",
            lambda: f"avg({self.number(2)})",
            lambda: "sum(big)",
            lambda: "sum(CAST(ratio * 0 AS DECIMAL(18, 4)))",
        )
        if self._random.random() < 0.2 and not made.startswith("count_if"):
            made += f" FILTER (WHERE {self.boolean(1)})"
        return made

    def _output(self, depth: int) -> str:
        if not depth:
            return self.aggregate()
        inner = depth - 1
        return self._one(
            self.aggregate,
            lambda: f"coalesce({self._output(inner)}, 0)",
            lambda: f"({self._output(inner)} - {self._output(inner)})",
            lambda: f"({self._output(inner)} * 2)",
            lambda: f"({self._output(inner)} / (1 + count(*)))",
            lambda: f"-{self.aggregate()}",
            lambda: f"abs({self._output(inner)})",
            lambda: f"CASE WHEN count(*) > 2 THEN {self._output(inner)} END",
            lambda: f"if(count({self.text(0)}) % 2 = 0, {self.aggregate()}, 7)",
            lambda: (
                "CASE WHEN count(*) BETWEEN 2 AND 3 THEN 'some' ELSE 'none' END = 'some'"
                if depth == 2
                else self.aggregate()
            ),
        )


_PLAIN: Sequence[str] = ("sale_id", "region", "ratio", "day", "moment", "place", "big", "price")
_VALUES: Sequence[str] = ("ratio", "day", "moment", "paid", "big", "price", "region")
_CATEGORIES: Sequence[str] = ("region", "shop", "paid", "quantity % 3", "upper(region)")
_MEET: Sequence[str] = ("shop = code", "region = code", "shop = code AND size > 1", "code = shop")
_GROUPS: Sequence[str] = (
    *("region", "quantity", "big", "ratio", "paid", "day", "moment", "place.city", "price"),
    *("upper(region)", "CAST(moment AS DATE)", "year(day)", "quantity > 1", "quantity % 3"),
    *("coalesce(region, 'none')", "ratio * 0", "date_trunc('MONTH', day)", "NULL", "1 + 1"),
)


def mangled(random: Random, sql: str) -> str:
    """A definition with some of its words taken out, doubled or put elsewhere."""
    words: list[Any] = sql.replace("(", " ( ").replace(")", " ) ").replace(",", " , ").split()
    for _ in range(random.randint(1, 4)):
        place, other = random.randrange(len(words)), random.randrange(len(words))
        words[place] = random.choice((words[other], "", words[place], random.choice(_WORDS)))
    return " ".join(words)


_WORDS: Sequence[str] = (
    *("*", "(", ")", ",", ".", "'", "`", "%", "/", "->", "::", ":", "?", "[", "]", "{", "}"),
    *("DISTINCT", "OVER", "GROUP", "BY", "ALL", "FROM", "WHERE", "AS", "CASE", "END", "NULL"),
    *("TRANSFORM", "USING", "COLLATE", "FILTER", "INTERVAL", "DATE", "CAST", "IN", "SELECT"),
    *("1e9", "0x1", "X'00'", "1L", "2BD", "'now'", "count()", "sum()", "mean(1,2)", "max(big)"),
    *("QUALIFY", "row_number()", "PARTITION", "HAVING", "ORDER", "LIMIT", "JOIN", "ON", "shop"),
    *("window(moment, '1 hour')", "window.start", "sale_changes", "LEFT", "DESC", "min(day)"),
    *("rand()", "transform(region)", "explode(1)", "struct(*)", "place.*", "sale", "@x", "$x"),
)
