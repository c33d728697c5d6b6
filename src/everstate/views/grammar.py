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
from everstate.errors import InvalidView
from everstate.views.definition import ViewDefinition
from everstate.views.names import names_of_entity, refused_name

DIALECT: Final = "spark"
IMAGE: Final = "__image__"
"""Stands for the struct column that holds an image, until a plan is asked for its columns."""

VIEW_NAME: Final = re.compile(r"^[a-z][a-z0-9_]{0,39}$")
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
_SPECIAL_TIMES: Final = ("now", "today", "tomorrow", "yesterday")
_CLOCK_NAMES: Final = frozenset({"now", "curdate", "current_time", "unix_timestamp"})

# Deterministic functions of Spark that sqlglot has no class for.
_PLAIN_FUNCTIONS: Final = frozenset(
    """aggregate ascii bigint bin boolean bround btrim char char_length character_length
    cot csc date decimal degrees double e elt endswith equal_null expm1 factorial find_in_set float
    forall format_number hash hypot ilike int isnotnull isnull len luhn_check mask mean named_struct
    negative nvl2 octet_length overlay percentage pmod positive printf radians rint sec shiftleft
    shiftright shiftrightunsigned signum sinh smallint soundex space startswith string
    substring_index timestamp timestamp_micros timestamp_millis timestamp_seconds tinyint
    to_char to_number translate try_to_number unix_date unix_micros unix_millis unix_seconds
    url_decode url_encode weekday width_bucket xxhash64 zeroifnull nullifzero""".split()
)

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
        if not VIEW_NAME.match(self.view):
            self.refuse(
                "the name cannot be a view's name",
                f"Use lower case words joined by underscores ({VIEW_NAME.pattern}).",
            )
        if (reason := refused_name(self.view)) is not None:
            self.refuse(f"the name cannot be a view's name: {reason}", "Choose another name.")
        if IMAGE in text:
            self.refuse(f"{IMAGE} is a reserved word")
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

        def rename(node: exp.Expr) -> exp.Expr:
            path = _path(node)
            return node if path is None else self._column(path)

        return expression.copy().transform(rename)

    def _check(self, node: exp.Expr, *, aggregates: bool) -> None:
        if isinstance(node, (exp.Query, exp.Exists, exp.Subquery)):
            self.refuse("subqueries are not kept", "Compare with constants or the entity's fields.")
        if isinstance(node, exp.Window):
            self.refuse("window functions are not kept", "Query them from the view or the history.")
        if isinstance(node, _CLOCK) or _called(node) in _CLOCK_NAMES or _is_special_time(node):
            self.refuse(
                f"{_shown(node)} changes without a change of an entity",
                "Keep the times as columns, and compare with now() when reading.",
            )
        if isinstance(node, _RANDOM):
            self.refuse(f"{_shown(node)} is not deterministic", "Store the value with the entity.")
        if isinstance(node, _SESSION):
            self.refuse(f"{_shown(node)} depends on the session", "Leave it out.")
        if isinstance(node, (exp.Explode, exp.Unnest, exp.UDTF)):
            self.refuse(
                f"{_shown(node)} makes several rows of one entity",
                "Make each element an entity of its own.",
            )
        if isinstance(node, exp.Lambda):
            self.refuse("lambda functions are not kept", "Store the computed field.")
        if isinstance(node, (exp.Placeholder, exp.Parameter, exp.SessionParameter)):
            self.refuse(f"{_shown(node)} has no value here", "Write the constant.")
        self._check_aggregate(node, allowed=aggregates)
        if isinstance(node, exp.Anonymous) and _called(node) not in _PLAIN_FUNCTIONS:
            self.refuse(
                f"function {node.name!r} is not known to be deterministic",
                "Use Spark's own deterministic functions, or store the value with the entity.",
            )

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
        identifiers = [exp.to_identifier(part, quoted=True) for part in (IMAGE, *parts)]
        return exp.Dot.build(identifiers)

    def type_of(self, path: tuple[str, ...]) -> pa.DataType | None:
        """Arrow type of a resolved path, ``None`` inside a map."""
        kind: pa.DataType = pa.struct(list(self._schema))
        for part in path:
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
    return expression.sql(dialect=DIALECT, comments=False, normalize_functions="upper")


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


def _is_special_time(node: exp.Expr) -> bool:
    """Whether it is a text like 'now' that Spark reads as the present time when it is cast."""
    cast = isinstance(node, exp.Cast) and isinstance(node.this, exp.Literal)
    return cast and str(node.this.this).strip().lower().startswith(_SPECIAL_TIMES)


def _shown(node: exp.Expr) -> str:
    return spark_text(node).lower()
