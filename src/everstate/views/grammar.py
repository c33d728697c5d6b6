"""Which SQL a view may be written in: reading it, naming its columns, refusing the rest.

Every refusal gives the reason and the nearest form that can be kept.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Final, NoReturn

import pyarrow as pa
import sqlglot
from sqlglot import exp

from everstate.changes import EntityType
from everstate.changes.keys import NAME
from everstate.errors import InvalidView
from everstate.views.definition import ViewDefinition
from everstate.views.names import names_of_entity, refused_name

DIALECT: Final = "spark"
IMAGE: Final = "__image__"
"""Stands for the struct column that holds an image, until a plan is asked for its columns."""

COLUMN_BYTES_MAX: Final = 63
"""PostgreSQL cuts longer names without telling."""

_CLAUSES: Final[dict[str, tuple[str, str]]] = {
    "with_": (
        "common table expressions are not kept",
        "Write one SELECT over the entity type.",
    ),
    "joins": (
        "joins are not kept yet",
        "Store the joined fields with the entity, or keep one view of each entity type.",
    ),
    "laterals": (
        "LATERAL VIEW makes several rows of one entity",
        "Make each element an entity of its own.",
    ),
    "distinct": (
        "DISTINCT is not kept",
        "Use SELECT a, b … GROUP BY a, b; it gives each combination once.",
    ),
    "having": (
        "HAVING is not kept",
        "Leave it out, and filter when reading: SELECT … FROM the view WHERE ….",
    ),
    "order": ("a view has no order", "Leave ORDER BY out, and order when reading."),
    "sort": ("a view has no order", "Leave SORT BY out, and order when reading."),
    "limit": ("LIMIT is not kept", "Leave it out, and limit when reading."),
    "offset": ("OFFSET is not kept", "Leave it out, and use it when reading."),
    "qualify": ("window functions are not kept", "Query them from the view or the history."),
    "windows": ("window functions are not kept", "Query them from the view or the history."),
}
_ALLOWED_ARGS: Final = frozenset({"expressions", "from_", "where", "group"})


def _classes(*names: str) -> tuple[type[exp.Expr], ...]:
    """Functions by the names of sqlglot's classes; a version may lack one."""
    return tuple(getattr(exp, name) for name in names if hasattr(exp, name))


_CLOCK: Final = _classes(
    "CurrentDate",
    "CurrentTime",
    "CurrentTimestamp",
    "CurrentTimestampLTZ",
    "CurrentDatetime",
    "Localtime",
    "Localtimestamp",
    "Systimestamp",
    "UtcDate",
    "UtcTime",
    "UtcTimestamp",
)
_RANDOM: Final = _classes(
    *("Rand", "Randn", "Randstr", "Uniform", "Normal", "Zipf", "Shuffle", "Uuid", "Generator"),
    *("GenerateBool", "GenerateDouble", "GenerateInt", "GenerateText"),
    *("Seq1", "Seq2", "Seq4", "Seq8", "NextValueFor", "Encrypt", "EncryptRaw", "Predict"),
    *(name for name in vars(exp) if name.startswith(("AI", "ML"))),
)
_SESSION: Final = _classes(
    "SessionUser",
    # Current…: user, role, schema, session, version; the times among them are clocks.
    *(name for name in vars(exp) if name.startswith("Current")),
)
_TIME_OF_READING: Final = re.compile(
    r"\s*(?:(?:now|today|tomorrow|yesterday)\b|T?\d{1,2}:\d)", re.IGNORECASE
)
"""Texts that Spark reads as a moment of the day on which it reads them."""
_CLOCK_NAMES: Final = frozenset({"now", "curdate", "current_time", "unix_timestamp"})

# Deterministic functions of Spark that sqlglot has no class for.
_PLAIN_FUNCTIONS: Final = frozenset(
    """aggregate ascii bigint bin boolean bround btrim char char_length character_length cot csc
    date decimal degrees double e elt endswith equal_null expm1 factorial find_in_set float
    forall format_number hash hypot ilike int isnotnull isnull len luhn_check make_date mask
    mean named_struct negative nvl2 octet_length overlay percentage pmod positive printf radians
    rint sec shiftleft shiftright shiftrightunsigned signum sinh smallint soundex space
    startswith string substring_index timestamp timestamp_micros timestamp_millis
    timestamp_seconds tinyint to_char to_number translate try_to_number unix_date unix_micros
    unix_millis unix_seconds url_decode url_encode weekday width_bucket xxhash64 zeroifnull
    nullifzero""".split()
)

_PARTS: Final = (
    *(exp.Column, exp.Dot, exp.Identifier, exp.Var, exp.Star, exp.Paren, exp.Bracket),
    *(exp.Literal, exp.Null, exp.Boolean, exp.HexString, exp.Interval, exp.IntervalSpan),
    *(exp.Add, exp.Sub, exp.Mul, exp.Div, exp.IntDiv, exp.Mod, exp.Neg, exp.DPipe),
    *(exp.BitwiseAnd, exp.BitwiseOr, exp.BitwiseXor, exp.BitwiseNot),
    *(exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.NullSafeEQ, exp.NullSafeNEQ),
    *(exp.And, exp.Or, exp.Not, exp.Is, exp.In, exp.Between, exp.Tuple),
    *(exp.Like, exp.ILike, exp.Escape, exp.Any, exp.All),
    *(exp.DataType, exp.DataTypeParam, exp.ColumnDef, exp.PropertyEQ, exp.Slice),
    *(exp.AtTimeZone, exp.FromTimeZone),
    *(exp.JSONPath, exp.JSONPathPart, exp.Distinct, exp.Filter, exp.Where),
)
"""What an expression may have besides functions; any other form is refused."""

_SAID_OTHERWISE: Final = (exp.UnixDate, exp.Space, exp.StrToUnix)
"""Functions that sqlglot writes as others of the same meaning."""
_TEXTS: Final = (exp.Upper, exp.Lower, exp.Substring, exp.Concat, exp.DPipe, exp.Trim)

SUPPORTED_AGGREGATES: Final = (exp.Count, exp.Sum, exp.Avg, exp.CountIf)
_EXTREMES: Final = (exp.Max, exp.Min, exp.ArgMax, exp.ArgMin)


class Grammar:
    """Reads one definition; every method raises InvalidView with reason and advice."""

    def __init__(self, definition: ViewDefinition, entity_types: Mapping[str, EntityType]) -> None:
        self.view = definition.name
        self.select = self._read(definition.sql)
        self.entity_type, self._aliases = self._source(entity_types)
        self._schema: pa.Schema = self.entity_type.arrow_schema

    def refuse(self, reason: str, advice: str | None = None) -> NoReturn:
        """Raise InvalidView of this view."""
        raise InvalidView(self.view, f"{reason}.", advice=advice)

    def _read(self, text: str) -> exp.Select:
        if not NAME.fullmatch(self.view):
            self.refuse(
                "the name cannot be a view's name",
                f"Use lower case words joined by underscores ({NAME.pattern}).",
            )
        if (reason := refused_name(self.view)) is not None:
            self.refuse(f"the name cannot be a view's name: {reason}", "Choose another name.")
        if IMAGE in text:
            self.refuse(f"{IMAGE} is a reserved word")
        if "\0" in text:
            self.refuse("the SQL has a NUL character")
        try:
            statements = sqlglot.parse(text, read=DIALECT)
        except sqlglot.errors.SqlglotError as cause:
            raise InvalidView(
                self.view,
                f"the SQL cannot be read: {_first_line(cause)}.",
                advice="Write SELECT … FROM <entity> [WHERE …] [GROUP BY …].",
            ) from cause
        if len(statements) != 1 or not isinstance(statements[0], exp.Select):
            self.refuse(
                "the SQL is not one SELECT",
                "Write SELECT … FROM <entity> [WHERE …] [GROUP BY …]; "
                "keep the parts of a UNION as views of their own.",
            )
        select: exp.Select = statements[0]
        for clause, found in select.args.items():
            if found and clause in _CLAUSES:
                self.refuse(*_CLAUSES[clause])
            if found and clause not in _ALLOWED_ARGS:
                self.refuse(f"{clause.strip('_').upper()} is not kept", "Leave it out.")
        return select

    def _source(self, entity_types: Mapping[str, EntityType]) -> tuple[EntityType, frozenset[str]]:
        source = self.select.args.get("from_")
        if source is None:
            self.refuse("it has no FROM", "Write FROM and the name of an entity type.")
        table = source.this
        if not isinstance(table, exp.Table):
            self.refuse("subqueries are not kept", "Write one SELECT over the entity type itself.")
        extras = {k for k, v in table.args.items() if v and k not in ("this", "alias")}
        alias = table.args.get("alias")
        if alias is not None and alias.args.get("columns"):
            extras.add("columns")
        if extras or not isinstance(table.this, exp.Identifier):
            self.refuse(
                f"{table.sql(dialect=DIALECT)} is no entity type",
                "Write FROM and the bare name of an entity type.",
            )
        name = table.name
        entity_type = entity_types.get(name) or entity_types.get(name.lower())
        if entity_type is None:
            self.refuse(
                f"unknown entity type {name!r}",
                suggestion(name, entity_types) or "Register it with @app.entity first.",
            )
        if self.view in names_of_entity(entity_type.name):
            self.refuse("the name is taken by the entity type", "Choose another name.")
        return entity_type, frozenset({table.alias_or_name.lower()})

    def resolved(self, expression: exp.Expr, *, aggregates: bool) -> exp.Expr:
        """Copy with every column named by its path in the image; refuses what cannot be kept.

        ``aggregates`` tells whether aggregate functions may stand in this place.
        """
        for node in expression.walk():
            self._check(node, aggregates=aggregates)
        self._check_text(expression)

        def rename(node: exp.Expr) -> exp.Expr:
            path = _path(node)
            return node if path is None else self._column(path)

        return expression.copy().transform(rename)

    def _check(self, node: exp.Expr, *, aggregates: bool) -> None:
        if isinstance(node, (exp.Query, exp.Exists, exp.Subquery)):
            self.refuse("subqueries are not kept", "Compare with constants or the entity's fields.")
        if isinstance(node, exp.Window):
            self.refuse("window functions are not kept", "Query them from the view or the history.")
        self._check_sameness(node)
        if isinstance(node, (exp.Explode, exp.Unnest, exp.UDTF)):
            self.refuse(
                f"{_shown(node)} makes several rows of one entity",
                "Make each element an entity of its own.",
            )
        if isinstance(node, exp.Lambda):
            self.refuse("lambda functions are not kept", "Store the computed field.")
        if isinstance(node, (exp.Placeholder, exp.Parameter, exp.SessionParameter)):
            self.refuse(f"{_shown(node)} has no value here", "Write the constant.")
        if isinstance(node, exp.Collate) or (
            isinstance(node, exp.DataType) and "COLLATE" in node.sql(dialect=DIALECT).upper()
        ):
            self.refuse(
                "COLLATE is not kept: rows and groups are told apart by their exact text",
                "Use lower(x) or upper(x).",
            )
        if isinstance(node, exp.Star) and not isinstance(node.parent, exp.Count):
            self.refuse("* stands inside an expression", "Name the columns, or write count(*).")
        if isinstance(node, exp.Literal) and node.is_string and "\0" in _unescaped(node):
            self.refuse("a text has a NUL character, which no view can hold")
        self._check_aggregate(node, allowed=aggregates)
        if isinstance(node, exp.Anonymous) and _called(node) not in _PLAIN_FUNCTIONS:
            self.refuse(
                f"function {node.name!r} is not known to be deterministic",
                "Use Spark's own deterministic functions, or store the value with the entity.",
            )
        if not isinstance(node, (*_PARTS, exp.Func)):
            self.refuse(f"{_shown(node)} is not known", "Write it with functions and operators.")

    def _check_text(self, expression: exp.Expr) -> None:
        """Refuse what Spark would be told otherwise than it is written."""
        try:
            text = spark_text(expression)
            again = sqlglot.parse_one(f"SELECT {text} AS x", read=DIALECT).expressions[0].this
        except (sqlglot.errors.SqlglotError, ValueError) as cause:
            self.refuse(f"{_first_line(cause)}", "Write it with other functions or operators.")
        alike = any(isinstance(node, _SAID_OTHERWISE) for node in expression.walk())
        if _comparable(expression) != _comparable(again) and not alike:
            self.refuse(
                f"{text} is not what was written", "Write it with other functions or operators."
            )

    def _check_sameness(self, node: exp.Expr) -> None:
        """Refuse what gives another value for the same image later, or elsewhere."""
        if isinstance(node, _CLOCK) or _called(node) in _CLOCK_NAMES or self._is_clock_text(node):
            self.refuse(
                f"{_shown(node)} changes without a change of an entity",
                "Keep the times as columns, and compare with now() when reading.",
            )
        if isinstance(node, _RANDOM):
            self.refuse(f"{_shown(node)} is not deterministic", "Store the value with the entity.")
        if isinstance(node, _SESSION):
            self.refuse(f"{_shown(node)} depends on the session", "Leave it out.")

    def _is_clock_text(self, node: exp.Expr) -> bool:
        """Whether it is a text like 'now' that Spark reads as the present time.

        It does so where a date or a time is wanted: in a CAST, and beside one in a comparison.
        Spark's own analysis has the last word on every other place, when the view is made
        (`pipeline.plan.column_types`).
        """
        if not isinstance(node, exp.Literal) or not node.is_string:
            return False
        parent: exp.Expr | None = node.parent
        if not _TIME_OF_READING.match(str(node.this)):
            return False
        if isinstance(parent, exp.Cast):
            return parent.args["to"].this not in exp.DataType.TEXT_TYPES
        if not isinstance(parent, (exp.Predicate, exp.Between, exp.In, exp.Add, exp.Sub)):
            return False
        beside = [part for part in parent.iter_expressions() if id(part) != id(node)]
        return not all(self._is_text(part) for part in beside)

    def _is_text(self, node: exp.Expr) -> bool:
        """Whether an expression is known to be a text, or null, which goes with every type."""
        if isinstance(node, (exp.Literal, exp.Null)):
            return isinstance(node, exp.Null) or bool(node.is_string)
        if isinstance(node, (*_TEXTS, exp.Paren, exp.Coalesce, exp.Nullif)):
            return isinstance(node, _TEXTS) or self._is_text(node.this)
        if isinstance(node, exp.Case):
            return self._is_text(node.args["ifs"][0].args["true"])
        path = _path(node)
        kind = None if path is None else self.type_of(self._names(path))
        return kind is not None and pa.types.is_string(kind)

    def _check_aggregate(self, node: exp.Expr, *, allowed: bool) -> None:
        if isinstance(node, _EXTREMES):
            self.refuse(
                f"{node.sql_name().lower()} cannot be kept by adding and subtracting",
                "Keep a row view of the field and ask for it when reading, "
                "or count(*) grouped by the field.",
            )
        supported = isinstance(node, SUPPORTED_AGGREGATES) or _called(node) == "mean"
        if isinstance(node, exp.AggFunc) and not supported:
            self.refuse(
                f"{node.sql_name().lower()} cannot be kept by adding and subtracting",
                "Use count, count_if, sum or avg.",
            )
        if supported and isinstance(node.this, exp.Distinct):
            self.refuse(
                "DISTINCT in an aggregate is not kept",
                "Group by the field in a view of its own, and count its rows when reading.",
            )
        if supported and not allowed:
            self.refuse(
                "an aggregate stands inside WHERE, GROUP BY or another aggregate",
                "Use aggregates in the SELECT list only.",
            )

    def _column(self, path: list[str]) -> exp.Expr:
        """Column of the image by its path; the first part may be the entity type or its alias."""
        identifiers = [exp.to_identifier(p, quoted=True) for p in (IMAGE, *self._names(path))]
        return exp.Dot.build(identifiers)

    def _names(self, path: list[str]) -> tuple[str, ...]:
        """A column's path in the entity's own spelling; refuses one that it does not have."""
        shown = ".".join(path)
        if path[0].lower() in self._aliases and len(path) > 1:
            path = path[1:]
        kind: pa.DataType = pa.struct(list(self._schema))
        parts: list[str] = []
        for part in path:
            fields = {field.name: field for field in kind} if pa.types.is_struct(kind) else {}
            exact = fields.get(part)
            alike = [field for name, field in fields.items() if name.lower() == part.lower()]
            if exact is None and len(alike) == 1:
                exact = alike[0]
            if exact is None and pa.types.is_map(kind):
                # m.key reads a map's value; deeper paths go on in the value's type.
                parts.append(part)
                kind = kind.item_type
                continue
            if exact is None:
                self.refuse(
                    f"unknown column {shown!r} of {self.entity_type.name}",
                    suggestion(part, fields) or f"Its columns are {', '.join(fields) or 'none'}.",
                )
            parts.append(exact.name)
            kind = exact.type
        return tuple(parts)

    def type_of(self, path: tuple[str, ...]) -> pa.DataType | None:
        """Arrow type of a resolved path, ``None`` when it is not told by the model alone."""
        kind: pa.DataType = pa.struct(list(self._schema))
        for part in path:
            if pa.types.is_map(kind):
                kind = kind.item_type
                continue
            if not pa.types.is_struct(kind):
                return None
            kind = kind.field(part).type
        return kind

    def columns(self) -> list[str]:
        """Names of the entity's columns, in its order."""
        return list(self._schema.names)


def suggestion(word: str, known: Mapping[str, object]) -> str | None:
    """`Did you mean …?` with the closest known words, ``None`` when none is close."""
    close = difflib.get_close_matches(word.lower(), list(known), n=3)
    return f"Did you mean {' or '.join(close)}?" if close else None


def image_path(node: exp.Expr) -> tuple[str, ...] | None:
    """Path of a resolved column, ``None`` when the node is no column."""
    names = _dotted(node)
    return tuple(names[1:]) if names and names[0] == IMAGE else None


def spark_text(expression: exp.Expr) -> str:
    """The one canonical text of an expression, in Spark's dialect."""
    return expression.sql(
        dialect=DIALECT,
        comments=False,
        normalize_functions="upper",
        unsupported_level=sqlglot.ErrorLevel.RAISE,
    )


def _comparable(expression: exp.Expr) -> exp.Expr:
    """An expression with one form of each CAST: sqlglot reads what Spark means in several."""

    def one_form(node: exp.Expr) -> exp.Expr:
        if isinstance(node, exp.DataType) and node.this is exp.DType.TIMESTAMP:
            return exp.DataType(this=exp.DType.TIMESTAMPTZ)
        if not isinstance(node, exp.Cast) or node.args.get("safe"):
            return node
        return exp.Cast(this=node.this, to=one_form(node.args["to"]))

    return expression.copy().transform(one_form)


def _path(node: exp.Expr) -> list[str] | None:
    """Names of a column as written, ``None`` when the node is no column."""
    if isinstance(node, exp.Column) and not isinstance(node.this, exp.Star):
        return [part.name for part in node.parts]
    names = _dotted(node)
    return names if names and names[0] != IMAGE else None


def _dotted(node: exp.Expr) -> list[str] | None:
    """Names of `a.b.c` when all its parts are names."""
    if isinstance(node, exp.Column):
        return [part.name for part in node.parts]
    if not isinstance(node, exp.Dot) or not isinstance(node.expression, exp.Identifier):
        return None
    head = node.this
    names = [head.name] if isinstance(head, exp.Identifier) else _dotted(head)
    return None if names is None else [*names, node.expression.name]


def _first_line(cause: Exception) -> str:
    line = str(cause).splitlines()[0]
    return line.partition(" but got <Token")[0].rstrip(".")


def _called(node: exp.Expr) -> str | None:
    return node.name.lower() if isinstance(node, exp.Anonymous) else None


def _unescaped(literal: exp.Expr) -> str:
    """A text as Spark reads it, of which sqlglot keeps some escapes as they are written."""
    return str(literal.this).replace("\\0", "\0")


def _shown(node: exp.Expr) -> str:
    return spark_text(node).lower()
