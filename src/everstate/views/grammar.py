"""The SQL in which a view may be written: reads it, resolves its columns, refuses the rest.

Every refusal has the reason and the nearest form that can be kept.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, NoReturn

import pyarrow as pa
import sqlglot
from sqlglot import exp

from everstate.changes import EntityType
from everstate.changes.arrow import change_columns
from everstate.changes.fields import meant
from everstate.changes.keys import NAME
from everstate.errors import InvalidView
from everstate.views.definition import ViewDefinition
from everstate.views.functions import (
    CLOCK,
    CLOCK_NAMES,
    ELSEWHERE,
    OTHER_AGGREGATES,
    PARTS,
    PLAIN_FUNCTIONS,
    RANDOM,
    REWRITTEN,
    SESSION,
    SUPPORTED_AGGREGATES,
    TEXTS,
    TIME_OF_READING,
    WINDOW_FUNCTION,
)
from everstate.views.kinds.images import IMAGE, authors_text
from everstate.views.names import names_of_entity, refused_name
from everstate.views.parsing import DIALECT, parsed

_CLAUSES: Final[dict[str, tuple[str, str]]] = {
    "with_": (
        "WITH (a common table expression) is not allowed",
        "Write one SELECT directly from the entity type.",
    ),
    "laterals": (
        "LATERAL VIEW is not allowed, because it makes several rows from one entity",
        "Store each element as an entity of its own.",
    ),
    "distinct": (
        "SELECT DISTINCT is not allowed",
        "Write SELECT a, b … GROUP BY a, b, which gives each combination once.",
    ),
    "sort": (
        "SORT BY is not allowed, because it sorts only within each of Spark's partitions",
        "Write ORDER BY.",
    ),
    "windows": (
        "a WINDOW clause is not allowed",
        "Compute window functions in the query that reads the view or the history.",
    ),
}
CHANGES: Final = "_changes"
"""Suffix of the name under which a definition reads the changes of an entity type."""
HISTORY: Final = "_history"
"""The same for its states, with the times from and to which they were valid."""
_AFTER: Final = "current"
_ALLOWED_ARGS: Final = frozenset(
    {"expressions", "from_", "where", "group", "having", "qualify", "order", "limit", "offset"}
)


class Grammar:
    """Reads one definition; every method raises InvalidView with reason and advice."""

    allowed: ClassVar[frozenset[str]] = _ALLOWED_ARGS
    """Clauses that a definition may have."""

    def __init__(self, definition: ViewDefinition, entity_types: Mapping[str, EntityType]) -> None:
        self.view, self.declared = definition.name, definition
        self.variables: set[str] = set()
        """Names that are no columns, such as the start of one of several windows."""
        self.of_changes = False
        """Whether it is `FROM <entity>_changes`: rows are changes, not present states."""
        self.of_history = False
        """Whether it is `FROM <entity>_history`: rows are all states, and not the present ones."""
        self.select = self._read(definition.sql)
        self.entity_type, self._aliases = self._source(entity_types)
        self._schema: pa.Schema = self.entity_type.arrow_schema
        if self.of_changes:
            self._schema = pa.schema(change_columns(self._schema))

    @property
    def key_path(self) -> tuple[str, ...]:
        """Path of the field that is the key itself (of an entity only if its key is text)."""
        if self.of_changes:
            return ("key",)
        field = self.entity_type.model.model_fields.get(self.entity_type.key)
        is_text = field is not None and meant(field.annotation) is str
        return (self.entity_type.key_column,) if is_text else ()

    def refuse(self, reason: str, advice: str | None = None) -> NoReturn:
        """Raise InvalidView of this view."""
        raise InvalidView(self.view, f"{reason}.", advice=advice)

    def _read(self, text: str) -> exp.Select:
        if not NAME.fullmatch(self.view) and not self.declared.is_part:
            self.refuse(
                "a view cannot have this name",
                f"Use lower-case words joined by underscores ({NAME.pattern}).",
            )
        if (reason := refused_name(self.view)) is not None:
            self.refuse(f"a view cannot have this name, because {reason}", "Choose another name.")
        if IMAGE in text:
            self.refuse(
                f"the SQL contains {IMAGE}, which everstate uses itself", "Choose another name."
            )
        if "\0" in text:
            self.refuse("the SQL contains a NUL character (\\0)", "Remove it.")
        try:
            statements = parsed(text)
        except sqlglot.errors.SqlglotError as cause:
            raise InvalidView(
                self.view,
                f"the SQL cannot be parsed: {_first_line(cause)}.",
                advice="Write SELECT … FROM <entity> [WHERE …] [GROUP BY …].",
            ) from cause
        if len(statements) != 1 or not isinstance(statements[0], exp.Select):
            self.refuse(
                "the SQL is not exactly one SELECT",
                "Write SELECT … FROM <entity> [WHERE …] [GROUP BY …]; "
                "declare each part of a UNION as a view of its own.",
            )
        select: exp.Select = statements[0]
        for clause, found in select.args.items():
            if not found or clause in self.allowed:
                continue
            if clause in _CLAUSES:
                self.refuse(*_CLAUSES[clause])
            self.refuse(
                f"the clause {clause.strip('_').upper()} is not allowed in a view", "Leave it out."
            )
        if not select.args.get("qualify") and any(select.find_all(exp.Window)):
            self.refuse(*WINDOW_FUNCTION)
        return select

    def _source(self, entity_types: Mapping[str, EntityType]) -> tuple[EntityType, frozenset[str]]:
        source = self.select.args.get("from_")
        if source is None:
            self.refuse("the SQL has no FROM", "Write FROM and the name of an entity type.")
        return self._table(source.this, entity_types)

    def _table(
        self, table: exp.Expr, entity_types: Mapping[str, EntityType]
    ) -> tuple[EntityType, frozenset[str]]:
        """The entity type of a table in the SQL, and its names (alias) there, in lower case."""
        if not isinstance(table, exp.Table):
            self.refuse(
                "a subquery in FROM is not allowed",
                "Write one SELECT directly from the entity type.",
            )
        extras = {k for k, v in table.args.items() if v and k not in ("this", "alias")}
        alias = table.args.get("alias")
        if alias is not None and alias.args.get("columns"):
            extras.add("columns")
        if extras or not isinstance(table.this, exp.Identifier):
            self.refuse(
                f"{table.sql(dialect=DIALECT)} is not the name of an entity type",
                "Write FROM and only the name of an entity type.",
            )
        name = table.name
        entity_type = entity_types.get(name) or entity_types.get(name.lower())
        if entity_type is None and name.lower().endswith(CHANGES):
            entity_type = entity_types.get(name.lower().removesuffix(CHANGES))
            self.of_changes = entity_type is not None
        if entity_type is None and name.lower().endswith(HISTORY):
            entity_type = entity_types.get(name.lower().removesuffix(HISTORY))
            self.of_history = entity_type is not None
        if entity_type is None:
            self.refuse(
                f"there is no entity type {name!r}",
                suggestion(name, entity_types) or "Register it with @app.entity first.",
            )
        if self.view in names_of_entity(entity_type.name):
            self.refuse(
                f"the entity type {entity_type.name} already uses this name", "Choose another name."
            )
        return entity_type, frozenset({table.alias_or_name.lower()})

    def resolved(self, expression: exp.Expr, *, aggregates: bool) -> exp.Expr:
        """Copy with every column named by its path in the image; refuses what cannot be kept.

        ``aggregates``: whether aggregate functions are allowed in this place.
        """
        for node in expression.walk():
            self._check(node, aggregates=aggregates)
        self._check_text(expression)

        def rename(node: exp.Expr) -> exp.Expr:
            path = _path(node)
            return node if path is None or path[0] in self.variables else self._column(path)

        return expression.copy().transform(rename)

    def _check(self, node: exp.Expr, *, aggregates: bool) -> None:
        if isinstance(node, (exp.Query, exp.Exists, exp.Subquery)):
            self.refuse(
                "a subquery is not allowed, because its result changes with other entities",
                "Compare with constants or with fields of the entity.",
            )
        if isinstance(node, exp.Window):
            self.refuse(*WINDOW_FUNCTION)
        self._check_sameness(node)
        if isinstance(node, (exp.Explode, exp.Unnest, exp.UDTF)):
            self.refuse(
                f"{_shown(node)} is not allowed, because it makes several rows from one entity",
                "Store each element as an entity of its own.",
            )
        if isinstance(node, exp.Lambda):
            self.refuse(
                "lambda functions are not allowed",
                "Compute the value in the entity, and store it as a field.",
            )
        if isinstance(node, (exp.Placeholder, exp.Parameter, exp.SessionParameter)):
            self.refuse(
                f"{_shown(node)} is a parameter, which has no value in a view", "Write a constant."
            )
        if isinstance(node, exp.Collate) or (
            isinstance(node, exp.DataType) and "COLLATE" in node.sql(dialect=DIALECT).upper()
        ):
            self.refuse(
                "COLLATE is not allowed, because groups are compared by their exact text",
                "Use lower(x) or upper(x).",
            )
        if isinstance(node, exp.Star) and not isinstance(node.parent, exp.Count):
            self.refuse("* is used inside an expression", "Name the columns, or write count(*).")
        if isinstance(node, exp.Literal) and node.is_string and "\0" in _unescaped(node):
            self.refuse(
                "a text contains a NUL character (\\0), which PostgreSQL cannot store",
                "Remove it.",
            )
        self._check_aggregate(node, allowed=aggregates)
        if isinstance(node, exp.Anonymous) and _called(node) not in PLAIN_FUNCTIONS:
            reason = (
                f"the function {node.name!r} is not allowed, because everstate does not know "
                "whether it always gives the same value for the same entity"
            )
            advice = (
                "Use a deterministic function of Spark, or store the value as a field of the "
                "entity."
            )
            self.refuse(*ELSEWHERE.get(node.name.lower(), (reason, advice)))
        if not isinstance(node, (*PARTS, exp.Func)):
            self.refuse(
                f"{_shown(node)} is not allowed in an expression",
                "Write it with functions and operators.",
            )

    def _check_text(self, expression: exp.Expr) -> None:
        """Refuse an expression that sqlglot would write for Spark with another meaning."""
        try:
            text = spark_text(expression)
            again = sqlglot.parse_one(f"SELECT {text} AS x", read=DIALECT).expressions[0].this
        except (sqlglot.errors.SqlglotError, ValueError) as cause:
            self.refuse(f"{_first_line(cause)}", "Write it with other functions or operators.")
        alike = any(isinstance(node, REWRITTEN) for node in expression.walk())
        if _comparable(expression) != _comparable(again) and not alike:
            self.refuse(
                f"an expression would have another meaning in Spark, as {text}",
                "Write it with other functions or operators.",
            )

    def _check_sameness(self, node: exp.Expr) -> None:
        """Refuse a part that may give another value for the same image: clock, random, session."""
        if isinstance(node, CLOCK) or _called(node) in CLOCK_NAMES or self._is_clock_text(node):
            self.refuse(
                f"{_shown(node)} is not allowed, because its value changes while no entity changes",
                "Select the time as a column, and compare it with now() in the query that reads "
                "the view.",
            )
        if isinstance(node, RANDOM):
            self.refuse(
                f"{_shown(node)} is not allowed, because it gives another value at each call",
                "Store the value as a field of the entity.",
            )
        if isinstance(node, SESSION):
            self.refuse(
                f"{_shown(node)} is not allowed, because it depends on the database session",
                "Leave it out.",
            )

    def _is_clock_text(self, node: exp.Expr) -> bool:
        """Whether it is a text like 'now' that Spark reads as the present time.

        Spark does so where a date or a time is expected: in a CAST, and when compared with one.
        Spark's own analysis checks all other places, when the view is installed
        (`pipeline.plan.column_types`).
        """
        if not isinstance(node, exp.Literal) or not node.is_string:
            return False
        parent: exp.Expr | None = node.parent
        if not TIME_OF_READING.match(str(node.this)):
            return False
        if isinstance(parent, exp.Cast):
            return parent.args["to"].this not in exp.DataType.TEXT_TYPES
        if not isinstance(parent, (exp.Predicate, exp.Between, exp.In, exp.Add, exp.Sub)):
            return False
        beside = [part for part in parent.iter_expressions() if id(part) != id(node)]
        return not all(self._is_text(part) for part in beside)

    def _is_text(self, node: exp.Expr) -> bool:
        """Whether an expression is known to be a text, or null, which fits every type."""
        if isinstance(node, (exp.Literal, exp.Null)):
            return isinstance(node, exp.Null) or bool(node.is_string)
        if isinstance(node, (*TEXTS, exp.Paren, exp.Coalesce, exp.Nullif)):
            return isinstance(node, TEXTS) or self._is_text(node.this)
        if isinstance(node, exp.Case):
            return self._is_text(node.args["ifs"][0].args["true"])
        path = _path(node)
        kind = None if path is None else self.type_of(self._names(path))
        return kind is not None and pa.types.is_string(kind)

    def _check_aggregate(self, node: exp.Expr, *, allowed: bool) -> None:
        supported = isinstance(node, SUPPORTED_AGGREGATES)
        # `x LIKE ANY (…)` is no aggregate.
        is_any = isinstance(node, exp.Any) and not isinstance(node.parent, (exp.Like, exp.ILike))
        if is_any or (isinstance(node, exp.AggFunc) and not supported):
            self.refuse(
                f"{_shown(node).partition('(')[0].strip()} cannot be updated change by change",
                OTHER_AGGREGATES.get(type(node), "Use count, count_if, sum, avg, min or max."),
            )
        if supported and isinstance(node.this, exp.Distinct) and not isinstance(node, exp.Count):
            self.refuse(
                "DISTINCT is allowed only in count",
                "Write count(DISTINCT x), or declare a view that groups by x.",
            )
        if supported and not allowed:
            self.refuse(
                "an aggregate is used inside WHERE, GROUP BY or another aggregate",
                "Use aggregates in the SELECT list, HAVING and ORDER BY.",
            )

    def ordinal(
        self, expression: exp.Expr, wanted: Sequence[tuple[str, exp.Expr]], clause: str
    ) -> exp.Expr | None:
        """The output that a number in a clause refers to; ``None``: it is no number."""
        if not isinstance(expression, exp.Literal) or expression.is_string:
            return None
        index = int(expression.this) - 1 if expression.this.isdigit() else -1
        if not 0 <= index < len(wanted):
            self.refuse(
                f"{clause} {expression.this} refers to a column that the SELECT list does not have",
                "Write the number or the name of a column of the SELECT list.",
            )
        return wanted[index][1]

    def without_aliases(
        self, expression: exp.Expr, wanted: Sequence[tuple[str, exp.Expr]], clause: str
    ) -> exp.Expr:
        """An expression of a clause with its aliases replaced by their expressions.

        In ORDER BY an alias has precedence over a column of its name, as in Spark; in the window of
        QUALIFY the column has; in HAVING a name that is both is refused. Inside an aggregate a name
        is always a column.
        """
        meant = {name.lower(): output for name, output in wanted}
        known = {column.lower() for column in self.columns()}

        def replaced(node: exp.Expr) -> exp.Expr:
            if not isinstance(node, exp.Column) or len(node.parts) > 1:
                return node
            name = node.name.lower()
            if name not in meant or meant[name] == node or node.find_ancestor(exp.AggFunc):
                return node
            if clause == "QUALIFY" and name in known:
                return node
            if clause == "HAVING" and name in known:
                self.refuse(
                    f"the name {node.name} in HAVING is both a column and an alias",
                    "Give the alias another name.",
                )
            return exp.paren(meant[name], copy=True)

        return expression.transform(replaced).unnest()

    def _column(self, path: list[str]) -> exp.Expr:
        """Column of the image by its path; the first part may be the entity type or its alias."""
        names = self._names(path)
        column = exp.Dot.build([exp.to_identifier(p, quoted=True) for p in (IMAGE, *names)])
        if self.of_changes and names == ("event",):
            return exp.func("GET_JSON_OBJECT", column, exp.Literal.string("$.type"))
        return column

    def _names(self, path: list[str]) -> tuple[str, ...]:
        """A column's path in the entity's own spelling; refuses one that it does not have."""
        shown = ".".join(path)
        if path[0].lower() in self._aliases and len(path) > 1:
            path = path[1:]
        if self.of_changes and path[0].lower() not in self._schema.names:
            path = [_AFTER, *path]  # a field without a prefix is one of the current state
        return self._spelled(path, shown)

    def _spelled(self, path: list[str], shown: str) -> tuple[str, ...]:
        kind: pa.DataType = pa.struct(list(self._schema))
        parts: list[str] = []
        for part in path:
            fields = {field.name: field for field in kind} if pa.types.is_struct(kind) else {}
            exact = fields.get(part)
            alike = [field for name, field in fields.items() if name.lower() == part.lower()]
            if exact is None and len(alike) == 1:
                exact = alike[0]
            if exact is None and pa.types.is_map(kind):
                # m.key reads a map's value; deeper paths continue in the value's type.
                parts.append(part)
                kind = kind.item_type
                continue
            if exact is None:
                known = f"There are {', '.join(fields)}." if fields else None
                self.refuse(
                    f"{self.entity_type.name} has no column {shown!r}"
                    f"{'' if fields else f': {parts[-1]} is of the type {kind}, without fields'}",
                    suggestion(part, fields) or known,
                )
            parts.append(exact.name)
            kind = exact.type
        return tuple(parts)

    def type_of(self, path: tuple[str, ...]) -> pa.DataType | None:
        """Arrow type of a resolved path, ``None`` when the model does not determine it."""
        kind: pa.DataType = pa.struct(list(self._schema))
        for part in path:
            if pa.types.is_map(kind):
                kind = kind.item_type
                continue
            if not pa.types.is_struct(kind):
                return None
            kind = kind.field(part).type
        return kind

    def shown(self, resolved: exp.Expr | str) -> str:
        """An expression or its text without image and quotes, as its author may have written it."""
        return authors_text(spark_text(resolved))

    def columns(self) -> list[str]:
        """Names of the entity's columns, in its order."""
        return list(self._schema.names)

    def columns_of(self, alias: str | None) -> list[tuple[str, exp.Expr]]:
        """The columns of `*`, or of `alias.*`."""
        if alias and alias.lower() not in self._aliases:
            self.refuse(f"{alias}.* names a table that is not in FROM", "Write *.")
        return [(name, exp.column(name, quoted=True)) for name in self.columns()]


def suggestion(word: str, known: Mapping[str, object]) -> str | None:
    """`Did you mean …?` with the closest known words, ``None`` when none is close."""
    close = difflib.get_close_matches(word.lower(), list(known), n=3)
    return f"Did you mean {' or '.join(close)}?" if close else None


def image_path(node: exp.Expr) -> tuple[str, ...] | None:
    """Path of a resolved column, ``None`` when the node is no column."""
    names = _dotted(node)
    return tuple(names[1:]) if names and names[0] == IMAGE else None


def spark_text(expression: exp.Expr | str) -> str:
    """The one canonical text of an expression, in Spark's dialect; a text is one already."""
    if isinstance(expression, str):
        return expression
    return expression.sql(
        dialect=DIALECT,
        comments=False,
        normalize_functions="upper",
        unsupported_level=sqlglot.ErrorLevel.RAISE,
    )


def _comparable(expression: exp.Expr) -> exp.Expr:
    """An expression with one form of each CAST, of which sqlglot has several for one meaning."""

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
    """A text with the NUL escape resolved, which sqlglot leaves as it is written."""
    return str(literal.this).replace("\\0", "\0")


def _shown(node: exp.Expr) -> str:
    return spark_text(node).lower()
