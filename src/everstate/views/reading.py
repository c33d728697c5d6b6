"""Outputs of a linear view: PostgreSQL's texts over groups, counts and sums.

An output is accepted only when PostgreSQL computes it as Spark would: each of its parts is a
number, a text or a boolean, and only forms with the same meaning in both are accepted. Everything
else is refused; grouping by the whole expression is always possible, because Spark computes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import pyarrow as pa
import sqlglot
from sqlglot import exp

ValueKind: TypeAlias = Literal["number", "text", "boolean", "null"]

_ARITHMETIC: Final = (exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod)
_ORDERED: Final = (exp.GT, exp.GTE, exp.LT, exp.LTE)
_ROUNDED: Final = (exp.Round, exp.Floor, exp.Ceil)
_COMPUTING: Final = (exp.Add, exp.Sub, exp.Mul, exp.Neg, exp.Abs, *_ROUNDED)
_NUMBER: Final = re.compile(r"[0-9]{1,38}(\.[0-9]{0,37})?|\.[0-9]{1,37}")
_PLACES: Final = re.compile(r"[0-9]{1,2}")
_ARGUMENTS: Final[Mapping[type[exp.Expr], frozenset[str]]] = {
    exp.Round: frozenset({"this", "decimals"}),
    exp.Floor: frozenset({"this"}),
    exp.Ceil: frozenset({"this"}),
    exp.In: frozenset({"this", "expressions"}),
    exp.Between: frozenset({"this", "low", "high"}),
}
"""Accepted arguments of functions and operators that have other forms, too."""


class NotReadable(Exception):
    """A part of an output that has no form which PostgreSQL and Spark compute alike.

    ``reason`` continues a sentence that begins with the part.
    """

    def __init__(self, node: exp.Expr, reason: str | None = None) -> None:
        self.node, self.has_reason = node, reason is not None
        self.reason = reason or (
            "is not allowed over aggregates and groups, because Spark and PostgreSQL may compute "
            "it differently"
        )
        super().__init__(self.reason)


def kind_of_type(kind: pa.DataType | None) -> ValueKind | None:
    """The kind of a group column of an Arrow type in an output; ``None``: it cannot be used."""
    if kind is None:
        return None
    if pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        return "number"
    if pa.types.is_boolean(kind):
        return "boolean"
    return "text" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else None


def postgres_text(
    output: exp.Expr,
    kinds: Mapping[str, ValueKind | None],
    wanted: ValueKind | None = None,
    picked: Collection[str] = (),
) -> str:
    """PostgreSQL's text of an output; ``kinds`` has the columns that it may use.

    ``wanted``: the kind that it must have. ``picked``: columns with the values of a field, as a
    max has, whose type may be too small for what is computed of them. Raises NotReadable with the
    part that is not accepted.
    """
    if isinstance(output, exp.Column) and wanted is None:
        return _text(output)  # a group or a count itself may have any type
    inner = _without_double(output)
    if _Kinds(kinds).of(inner) not in (wanted, "null") and wanted is not None:
        raise NotReadable(output, f"is not a {wanted}")
    whole = {*picked, *(name for name in kinds if name.startswith("g"))}
    exact = _exact(inner, {name for name in whole if kinds.get(name) == "number"})
    return _text(exact if inner is output else exp.cast(exact, "DOUBLE"))


def _without_double(output: exp.Expr) -> exp.Expr:
    """The argument of an output that is cast to DOUBLE; any other output unchanged."""
    if _is_cast(output) and output.args["to"].this is exp.DType.DOUBLE:
        found: exp.Expr = output.this
        return found
    return output


def _is_cast(node: exp.Expr) -> bool:
    """Whether it is a CAST; sqlglot reads Spark's CAST as a TRY_CAST that is not safe."""
    return isinstance(node, exp.Cast) and not node.args.get("safe")


class _Kinds:
    """The kind of each part of an output; raises NotReadable for a part that has none."""

    def __init__(self, columns: Mapping[str, ValueKind | None]) -> None:
        self._columns = columns

    def of(self, node: exp.Expr) -> ValueKind:
        """The kind of a part."""
        allowed = _ARGUMENTS.get(type(node))
        if allowed is not None and {name for name, value in node.args.items() if value} - allowed:
            raise NotReadable(node)
        for types, judge in self._JUDGES:
            if isinstance(node, types):
                return judge(self, node)
        raise NotReadable(node)

    def _all(self, wanted: ValueKind, *parts: exp.Expr) -> ValueKind:
        for part in parts:
            if self.of(part) not in (wanted, "null"):
                raise NotReadable(part, f"is not a {wanted}")
        return wanted

    def _same(self, *parts: exp.Expr) -> ValueKind:
        """The common kind of all parts; null fits every kind."""
        found: ValueKind = "null"
        for part in parts:
            kind = self.of(part)
            if "null" not in (kind, found) and kind != found:
                raise NotReadable(
                    part, f"is a {kind}, but the values beside it are of kind {found}"
                )
            found = kind if found == "null" else found
        return found

    def _column(self, node: exp.Expr) -> ValueKind:
        kind = self._columns.get(node.name)
        if kind is None:
            raise NotReadable(node)
        return kind

    def _literal(self, node: exp.Expr) -> ValueKind:
        if node.is_string:
            return "text"
        if not _NUMBER.fullmatch(str(node.this)):
            raise NotReadable(node, "is not a number in plain digits")
        return "number"

    def _rounded(self, node: exp.Expr) -> ValueKind:
        places = node.args.get("decimals")
        if places is not None:
            places = places.this if isinstance(places, exp.Neg) else places
            if not isinstance(places, exp.Literal) or not _PLACES.fullmatch(str(places.this)):
                raise NotReadable(node, "is not rounded to a constant number of decimal places")
        return self._all("number", node.this)

    def _cast(self, node: exp.Expr) -> ValueKind:
        to = node.args["to"]
        if not _is_cast(node) or to.this is not exp.DType.DECIMAL:
            raise NotReadable(
                node,
                "is a CAST over an aggregate or a group; only a CAST to DECIMAL(p, s) or DOUBLE "
                "is allowed",
            )
        if not to.expressions:
            raise NotReadable(
                node,
                "has no decimal places, because DECIMAL means DECIMAL(10, 0) in Spark; write "
                "DECIMAL(p, s)",
            )
        return self._all("number", node.this)

    def _is(self, node: exp.Expr) -> ValueKind:
        if not isinstance(node.expression, exp.Null):
            return self._all("boolean", node.this, node.expression)
        if not isinstance(node.this, exp.Column):
            self.of(node.this)
        return "boolean"

    def _equal(self, node: exp.Binary) -> ValueKind:
        self._same(node.left, node.right)
        return "boolean"

    def _ordered(self, node: exp.Binary) -> ValueKind:
        self._all("number", node.left, node.right)
        return "boolean"

    def _between(self, node: exp.Expr) -> ValueKind:
        self._all("number", node.this, node.args["low"], node.args["high"])
        return "boolean"

    def _in(self, node: exp.Expr) -> ValueKind:
        self._same(node.this, *node.expressions)
        return "boolean"

    def _case(self, node: exp.Expr) -> ValueKind:
        branches: Sequence[exp.Expr] = node.args["ifs"]
        if node.this is not None:
            self._same(node.this, *(branch.this for branch in branches))
        else:
            self._all("boolean", *(branch.this for branch in branches))
        rest = node.args.get("default")
        results = [branch.args["true"] for branch in branches]
        return self._same(*results, *([] if rest is None else [rest]))

    def _if(self, node: exp.Expr) -> ValueKind:
        self._all("boolean", node.this)
        results = [node.args.get("true"), node.args.get("false")]
        return self._same(*(result for result in results if result is not None))

    def _first(self, node: exp.Expr) -> ValueKind:
        others = node.expressions or [node.args.get("expression")]
        return self._same(node.this, *(other for other in others if other is not None))

    _JUDGES: Final[Sequence[tuple[tuple[type[exp.Expr], ...], Callable[..., ValueKind]]]] = (
        ((exp.Paren,), lambda self, node: self.of(node.this)),
        ((exp.Column,), _column),
        ((exp.Literal,), _literal),
        ((exp.Null,), lambda self, node: "null"),
        ((exp.Boolean,), lambda self, node: "boolean"),
        (_ARITHMETIC, lambda self, node: self._all("number", node.left, node.right)),
        ((exp.Neg, exp.Abs), lambda self, node: self._all("number", node.this)),
        ((exp.And, exp.Or), lambda self, node: self._all("boolean", node.left, node.right)),
        ((exp.Not,), lambda self, node: self._all("boolean", node.this)),
        ((exp.EQ, exp.NEQ), _equal),
        (_ORDERED, _ordered),
        ((exp.Is,), _is),
        ((exp.Between,), _between),
        ((exp.In,), _in),
        ((exp.Case,), _case),
        ((exp.If,), _if),
        ((exp.Coalesce, exp.Nullif), _first),
        (
            (exp.Greatest, exp.Least),
            lambda self, node: self._all("number", node.this, *node.expressions),
        ),
        (_ROUNDED, _rounded),
        ((exp.Cast,), _cast),
    )


def _exact(output: exp.Expr, narrow: Collection[str]) -> exp.Expr:
    """The same with numbers that cannot overflow, and null for a division by zero.

    A number with more digits than it is cast to is null, too: one group must not make the whole
    view unreadable. ``narrow``: columns whose type may overflow in a computation.
    """

    def widen(node: exp.Expr) -> exp.Expr:
        if isinstance(node, (exp.Div, exp.Mod)):
            right = exp.Nullif(this=node.right, expression=exp.Literal.number(0))
            left = exp.cast(node.left, "DECIMAL")
            if isinstance(node, exp.Mod):
                return exp.Mod(this=left, expression=right)
            return exp.Div(this=left, expression=right, typed=True, safe=False)
        if isinstance(node, exp.Cast) and node.to.expressions:
            return _null_beyond(node)
        is_narrow = isinstance(node, exp.Column) and node.name in narrow
        if is_narrow and node.find_ancestor(*_COMPUTING):
            return exp.cast(node, "DECIMAL")
        return node

    # From the leaves to the root, so that replaced nodes are not visited again.
    nodes = list(output.copy().walk(bfs=False))
    root = nodes[0]
    for node in reversed(nodes):
        made = widen(node)
        if made is not node:
            if node is root:
                root = made
            else:
                node.replace(made)
    return root


def _null_beyond(node: exp.Cast) -> exp.Expr:
    """A CAST to DECIMAL(p, s), null where a number has more digits."""
    digits, *places = (int(size.name) for size in node.to.expressions)
    scale = places[0] if places else 0
    rounded = exp.Round(this=node.this.copy(), decimals=exp.Literal.number(scale))
    bound = exp.Literal.number(10 ** (digits - scale))
    return exp.case().when(exp.LT(this=exp.Abs(this=rounded), expression=bound), node.copy())


def overflow_sql(postgres_sql: str) -> str | None:
    """The condition on which a CAST in an output's text is null because its value is too large.

    ``None``: the text has no such CAST. ``postgres_sql``: a text that this module has made.
    """
    found = []
    for case in sqlglot.parse_one(postgres_sql, dialect="postgres").find_all(exp.Case):
        within, cast = case.args["ifs"][0].this, case.args["ifs"][0].args["true"]
        # As `_null_beyond` makes it; a CASE of the author has no CAST with a size right inside.
        if isinstance(cast, exp.Cast) and cast.to.expressions:
            found.append(f"{_text(cast.this)} IS NOT NULL AND NOT {_text(within)}")
    return " OR ".join(f"({each})" for each in found) or None


def _text(expression: exp.Expr) -> str:
    return expression.sql(dialect="postgres", comments=False)
