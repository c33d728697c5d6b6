"""Two entity types in one definition: `FROM flight f JOIN airline a ON f.carrier = a.code`.

The two are read as one entity type with a field for each side, so that the rest of the grammar
applies. Spark computes expressions over one side from each image of that side, in a part;
PostgreSQL computes expressions over both sides, in the forms that both engines compute alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, TypeAlias

import pyarrow as pa
from sqlglot import exp
from sqlglot.errors import SqlglotError

from everstate.changes import EntityType
from everstate.views.definition import ViewDefinition
from everstate.views.grammar import Grammar, image_path, spark_text, suggestion
from everstate.views.kinds.images import IMAGE
from everstate.views.parsing import DIALECT, parsed
from everstate.views.reading import NotReadable, ValueKind, kind_of_type, postgres_text

Side: TypeAlias = Literal["l", "r"]
SIDES: Final[tuple[Side, Side]] = ("l", "r")
_SIDE: Final = re.compile(rf"`{IMAGE}`\.`([lr])`\.")
_ADVICE: Final = "Write FROM flight f JOIN airline a ON f.carrier = a.code."
_CONDITIONS: Final = (exp.Predicate, exp.Connector, exp.Not)
_NOT_ALIKE: Final = "Spark and PostgreSQL do not compute it alike"


def has_join(definition: ViewDefinition) -> bool:
    """Whether a definition has a join; false when its SQL cannot be read."""
    try:
        statements = parsed(definition.sql)
    except (SqlglotError, ValueError):
        return False
    return any(isinstance(s, exp.Select) and bool(s.args.get("joins")) for s in statements)


class JoinGrammar(Grammar):
    """Reads a definition over two entity types; a column's path begins with its side."""

    allowed: ClassVar[frozenset[str]] = Grammar.allowed - {"qualify"} | {"joins"}

    def __init__(self, definition: ViewDefinition, entity_types: Mapping[str, EntityType]) -> None:
        self.types: dict[Side, EntityType] = {}
        self.aliases: dict[Side, str] = {}
        super().__init__(definition, entity_types)
        if self.of_changes or self.of_history:
            self.refuse(
                "a join of changes or of histories is not allowed",
                "Join the present states: FROM <entity>.",
            )
        self._schema = pa.schema(
            [(side, pa.struct(list(kind.arrow_schema))) for side, kind in self.types.items()]
        )

    def _source(self, entity_types: Mapping[str, EntityType]) -> tuple[EntityType, frozenset[str]]:
        found = super()._source(entity_types)
        joins = self.select.args["joins"]
        if len(joins) > 1:
            self.refuse(
                "a join has at most two entity types",
                "Declare a view of two, and join the third in the query that reads it.",
            )
        self.join = joins[0]
        kind = (self.join.side or "INNER").upper()
        plain = kind in ("INNER", "LEFT") and (self.join.kind or "").upper() in (
            "",
            "INNER",
            "OUTER",
        )
        if not plain or self.join.args.get("method") or self.join.args.get("on") is None:
            text = self.join.sql(dialect=DIALECT, comments=False)
            self.refuse(f"{text} is not allowed; only JOIN … ON and LEFT JOIN … ON are", _ADVICE)
        self.is_left = kind == "LEFT"
        right, aliases = self._table(self.join.this, entity_types)
        if right is found[0]:
            self.refuse(
                "an entity type cannot be joined with itself",
                "Declare two views, and join them in the query that reads them.",
            )
        self.types = {"l": found[0], "r": right}
        self.aliases = {"l": next(iter(found[1])), "r": next(iter(aliases))}
        if self.aliases["l"] == self.aliases["r"]:
            self.refuse("both entity types have the same alias", _ADVICE)
        return found[0], found[1] | aliases

    @property
    def key_path(self) -> tuple[str, ...]:
        """Empty: a join has no single key."""
        return ()

    def columns(self) -> list[str]:
        """Names that are columns of either side."""
        return [name for kind in self.types.values() for name in kind.arrow_schema.names]

    def columns_of(self, alias: str | None) -> list[tuple[str, exp.Expr]]:
        """The columns of `*`, or of `alias.*`."""
        found: list[tuple[str, exp.Expr]] = []
        for side, name in self.aliases.items():
            if alias is None or alias.lower() == name:
                columns = self.types[side].arrow_schema.names
                found += [(c, exp.column(c, table=name, quoted=True)) for c in columns]
        return found

    def shown(self, resolved: exp.Expr | str) -> str:
        """An expression or its text with aliases for paths, as its author may have written it."""
        text = spark_text(resolved)
        for side, alias in self.aliases.items():
            text = text.replace(f"`{IMAGE}`.`{side}`.", f"{alias}.")
        return text.replace("`", "")

    def _names(self, path: list[str]) -> tuple[str, ...]:
        first = path[0].lower()
        for side, alias in self.aliases.items():
            if first == alias and len(path) > 1:
                return self._within(side, path[1:])
        owners = [
            side
            for side, kind in self.types.items()
            if first in (name.lower() for name in kind.arrow_schema.names)
        ]
        if len(owners) > 1:
            both = " and ".join(kind.name for kind in self.types.values())
            self.refuse(
                f"both {both} have a column {path[0]!r}", f"Write {self.aliases['l']}.{path[0]}."
            )
        if not owners:
            known = dict.fromkeys(self.columns())
            self.refuse(
                f"neither entity type has a column {'.'.join(path)!r}", suggestion(path[0], known)
            )
        return self._within(owners[0], path)

    def _within(self, side: Side, path: list[str]) -> tuple[str, ...]:
        # Without resolving aliases again: the side `l` or `r` may be the alias of the other side.
        return self._spelled([side, *path], ".".join(path))


def sides(text: str) -> set[str]:
    """Sides whose columns a canonical text uses."""
    return set(_SIDE.findall(text))


def in_definition(node: exp.Expr, alias: str | None = None) -> exp.Expr:
    """A canonical expression of one side as in a definition, with or without an alias."""

    def renamed(part: exp.Expr) -> exp.Expr:
        path = image_path(part)
        if path is None:
            return part
        _, first, *inner = path
        column: exp.Expr = exp.column(first, table=alias, quoted=True)
        for name in inner:
            column = exp.Dot(this=column, expression=exp.to_identifier(name, quoted=True))
        return column

    return node.copy().transform(renamed)


def conjuncts(node: exp.Expr | None) -> list[exp.Expr]:
    """The conditions that AND connects; empty without a condition."""
    if node is None:
        return []
    if isinstance(node, exp.Paren):
        return conjuncts(node.this)
    if isinstance(node, exp.And):
        return [*conjuncts(node.left), *conjuncts(node.right)]
    return [node]


@dataclass
class JoinColumns:
    """Collects the columns that a join needs from its two sides."""

    grammar: JoinGrammar
    found: dict[Side, list[exp.Expr]] = field(default_factory=lambda: {"l": [], "r": []})
    kinds: dict[str, ValueKind | None] = field(default_factory=dict)

    def text(self, resolved: exp.Expr, what: str, wanted: ValueKind | None = None) -> str:
        """PostgreSQL's text of an expression over both sides; raises InvalidView."""
        made = self._made(resolved)
        try:
            return postgres_text(made, self.kinds, wanted)
        except NotReadable as refused:
            self.grammar.refuse(
                f"{what}: {self.grammar.shown(resolved)} needs fields of both sides of the join, "
                f"and {f'a part of it {refused.reason}' if refused.has_reason else _NOT_ALIKE}",
                "Over both sides, use only numbers, texts, comparisons and CASE. Compute the rest "
                "in the query that reads the view."
                + (
                    " A LEFT JOIN may find no right row, so an expression over its fields counts "
                    "as one over both sides."
                    if self.grammar.is_left
                    else ""
                ),
            )

    def _made(self, node: exp.Expr) -> exp.Expr:
        """The expression over columns of the sides, in place of their fields."""
        needed = sides(spark_text(node))
        if len(needed) == 1:
            side = next(each for each in SIDES if each in needed)
            # When a LEFT JOIN finds no row, fields are null, but expressions over them may not be.
            if side == "l" or not self.grammar.is_left or image_path(node) is not None:
                return exp.column(self.name(side, node))
        if not needed:
            return node.copy()
        made = node.copy()
        for name, value in list(node.args.items()):
            if isinstance(value, exp.Expr):
                made.set(name, self._made(value))
            elif isinstance(value, list):
                made.set(name, [self._made(v) if isinstance(v, exp.Expr) else v for v in value])
        return made

    def name(self, side: Side, node: exp.Expr) -> str:
        """The name of the side's column for an expression, which is added if it is new."""
        columns = self.found[side]
        if node not in columns:
            columns.append(node)
            path = image_path(node)
            kind = kind_of_type(None if path is None else self.grammar.type_of(path))
            is_condition = isinstance(node.unnest(), _CONDITIONS)
            self.kinds[f"{side}{len(columns) - 1}"] = "boolean" if is_condition else kind
        return f"{side}{columns.index(node)}"


@dataclass(frozen=True, slots=True)
class JoinConditions:
    """The conditions of a join: equal keys, filters of each side, and others."""

    keys: tuple[tuple[exp.Expr, exp.Expr], ...]
    """Canonical expressions of the left and the right side."""
    where: Mapping[Side, Sequence[exp.Expr]]
    """Canonical conditions on only one side, applied before the join."""
    on: tuple[exp.Expr, ...]
    """Other conditions of ON."""
    after: tuple[exp.Expr, ...]
    """Conditions on the joined rows."""


def joined(grammar: JoinGrammar) -> JoinConditions:
    """Split ON and WHERE into the conditions of a join; raises InvalidView."""
    keys: list[tuple[exp.Expr, exp.Expr]] = []
    where: dict[Side, list[exp.Expr]] = {"l": [], "r": []}
    on: list[exp.Expr] = []
    for each in conjuncts(grammar.join.args["on"]):
        resolved = grammar.resolved(each, aggregates=False)
        if (pair := _key(grammar, resolved)) is not None:
            keys.append(pair)
            continue
        needed = sides(spark_text(resolved))
        if needed == {"r"} or (needed == {"l"} and not grammar.is_left):
            where["r" if needed == {"r"} else "l"].append(resolved)
        else:
            on.append(resolved)
    if not keys:
        grammar.refuse(
            "ON does not compare a field of the left side with one of the right side by =", _ADVICE
        )
    after: list[exp.Expr] = []
    condition = grammar.select.args.get("where")
    for each in conjuncts(None if condition is None else condition.this):
        resolved = grammar.resolved(each, aggregates=False)
        needed = sides(spark_text(resolved))
        if needed == {"l"} or (needed == {"r"} and not grammar.is_left):
            where["l" if needed == {"l"} else "r"].append(resolved)
        else:
            after.append(resolved)
    return JoinConditions(tuple(keys), where, tuple(on), tuple(after))


def _key(grammar: JoinGrammar, node: exp.Expr) -> tuple[exp.Expr, exp.Expr] | None:
    """Left and right side of an equation between the sides; ``None``: it is no such equation."""
    if not isinstance(node, exp.EQ):
        return None
    pair = {
        next(iter(s)): n for n in (node.left, node.right) if len(s := sides(spark_text(n))) == 1
    }
    if pair.keys() != {"l", "r"}:
        return None
    left, right = (_class_of(grammar, pair[side]) for side in ("l", "r"))
    if left is not None and right is not None and left != right:
        grammar.refuse(
            f"{grammar.shown(node)} compares {left} with {right}",
            "CAST one side, so that both have the same type.",
        )
    return pair["l"], pair["r"]


def _class_of(grammar: JoinGrammar, node: exp.Expr) -> str | None:
    """The class of types that a field's values are compared as; ``None``: it is not known."""
    if isinstance(node, exp.Cast):
        return _class_of_cast(node.to)
    path = image_path(node)
    kind = None if path is None else grammar.type_of(path)
    if kind is None:
        return None
    if pa.types.is_integer(kind) or pa.types.is_decimal(kind) or pa.types.is_floating(kind):
        return "a number"
    if pa.types.is_timestamp(kind):
        return "a time" if kind.tz else "a local time"
    return "a date" if pa.types.is_date(kind) else str(kind)


def _class_of_cast(kind: exp.DataType) -> str | None:
    if kind.is_type(*exp.DataType.NUMERIC_TYPES):
        return "a number"
    return "string" if kind.is_type(*exp.DataType.TEXT_TYPES) else None
