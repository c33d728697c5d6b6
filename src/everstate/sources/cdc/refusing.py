"""Refuses a capture whose tables cannot be captured correctly, before anything is made for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from everstate.changes import EntityType
from everstate.declarations.captures import Capture, ProvenanceFrom
from everstate.errors import CaptureFailed, EverstateError
from everstate.sources.cdc.connectors import (
    CLASSES,
    SAFE_VERSIONS,
    Peculiarities,
    SourceColumn,
    TableShape,
)
from everstate.sources.cdc.convert import inferred, reads_as
from everstate.sources.cdc.database import Finding, verdict
from everstate.sources.cdc.mapping import NO_COLUMN, TableMapping, mapping_of
from everstate.sources.cdc.rest import Connect
from everstate.sources.cdc.rows import Unreadable

_UNPRINTED: Final = re.compile(r"[\x00-\x1f\x7f]")
_SIGNS: Final = frozenset(",:;()[]{}*+?|^\\")
"""Signs that a list or an expression in a connector's settings cannot have in a table's name."""
_QUOTE: Final = {"postgresql": '"'}
"""Sign around names in SQL: Debezium's snapshot does not double it within a name, and fails."""
_GENERATED: Final = "it is generated, and its table could not be read again"
_APART: Final = (
    "FULL writes the whole row before to the log at each UPDATE and DELETE. Without it: leave the "
    "column out with column.exclude.list in the capture's settings. A connector of an earlier "
    "version learns to mark bytea by `everstate cdc add`."
)


def refuse_failed(capture: Capture, findings: Iterable[Finding]) -> None:
    """Raise CaptureFailed, with advice, when one of the findings is a failure."""
    failed = [each for each in findings if each.outcome == "fail"]
    lines = [" ".join([f"- {f.name}: {f.found}.", *f.sql, f.advice or ""]) for f in failed]
    if lines:
        raise CaptureFailed(
            f"capture {capture.name}: nothing was made, because these tables cannot be captured "
            "as they are:\n" + "".join(f"{line.strip()}\n" for line in lines),
            advice=f"`everstate cdc doctor {capture.name}` shows this and all the rest.",
        )


def name_findings(capture: Capture) -> Iterator[Finding]:
    """Tables whose names a connector's settings cannot hold, so that they would not be captured."""
    for table in capture.captured_tables:
        quotes = _QUOTE.get(capture.kind, "")
        bad = sorted(_SIGNS.union(quotes).intersection(table)) + _UNPRINTED.findall(table)
        if not bad and all(part == part.strip() for part in table.split(".")):
            continue
        found = f"its name has {' '.join(map(repr, bad))}" if bad else "its name has blanks around"
        advice = "Rename the table, or capture a table with another name that it is copied to."
        found += ", which no connector can have in its list of tables"
        yield Finding(f"name of {table}", "fail", found, advice=advice)


def shape_findings(
    capture: Capture,
    entities: Mapping[str, EntityType],
    shapes: Mapping[str, TableShape],
    settings: Mapping[str, str],
) -> Iterator[Finding]:
    """Whether each field has a column whose values arrive, and each row an entity of its own.

    ``settings``: those of the connector. Without a table's entity type only columns are checked at
    which the connector would fail, since none is left out.
    """
    leaves_out = "column.include.list" not in settings
    for table, shape in shapes.items():
        declared = capture.tables[table]
        columns = {each.name: _as_set(table, each, settings) for each in shape.columns}
        sources: Mapping[str, str | None] = {}
        mapping = mapping_of(capture, table, entities)
        if mapping is not None:
            try:
                sources = mapping.sources(list(columns))
            except Unreadable as cause:
                advice = "Give the field's column in `columns` of its Table, or `drop` the other."
                yield Finding(f"columns of {table}", "fail", str(cause), advice=advice)
            if beside := ", ".join(mapping.columns_beside_key(shape.key)):
                key, entity = mapping.entity_type.key, declared.entity
                found = f"a row is named by {', '.join(shape.key)}, and the key {key} of {entity} "
                found += f"does not depend on {beside}: rows that differ there would become one "
                advice = f"Declare computed={{{key!r}: …}}, a function of all these columns."
                yield Finding(f"key of {table}", "fail", f"{found}entity", advice=advice)
            yield from _audit(table, columns, declared.provenance)
            for field, column in sources.items():
                if column is not None:
                    yield from _misread(table, columns[column], field, mapping)
                    continue
                advice = f"Give its column in `columns` of the Table of {table}; for a field that "
                advice += (
                    f"has none declare computed={{{field!r}: …}}, a function of the state, or "
                )
                advice += "remove it from the model."
                found = f"it {NO_COLUMN} {field}"
                yield Finding(f"columns of {table}", "fail", found, advice=advice)
        fields = {column: field for field, column in sources.items() if column is not None}
        left_out = _unread(shape, mapping) if leaves_out and mapping is not None else {}
        for each in columns.values():
            if each.name not in left_out:
                yield from _column(table, each, fields.get(each.name))
                continue
            found = f"left out, since no field has it: {left_out[each.name]}"
            yield Finding(f"column {table}.{each.name}", "ok", found)


def peculiarities(
    capture: Capture, entities: Mapping[str, EntityType], shapes: Mapping[str, TableShape]
) -> Peculiarities:
    """Properties of these tables that the connector's settings must contain.

    Generated columns are left out, since the log lacks them and a snapshot has them; so are columns
    that nothing reads and at which the connector would fail. Of a table whose entity type is not
    known it cannot be said what is read.
    """
    left_out = {
        table: {column.name: _GENERATED for column in shape.columns if column.is_generated}
        for table, shape in shapes.items()
    }
    for table, shape in shapes.items():
        if (mapping := mapping_of(capture, table, entities)) is not None:
            left_out[table].update(_unread(shape, mapping))
    keys = {table: shape.key for table, shape in shapes.items() if not shape.has_primary_key}
    return Peculiarities(left_out, keys)


def _unread(shape: TableShape, mapping: TableMapping) -> dict[str, str]:
    """Columns that nothing reads, and at which the connector would fail → why."""
    read = {name.lower() for name in (*shape.key, *mapping.table.provenance.columns.values())}
    return {
        column.name: why
        for column in shape.columns
        if (why := column.unmarked or (column.absent if column.fails else None)) is not None
        and column.name.lower() not in read
        and mapping.field_of(column.name) is None
    }


def _audit(
    table: str, columns: Mapping[str, SourceColumn], provenance: ProvenanceFrom
) -> Iterator[Finding]:
    """Whether the values of each column with provenance arrive."""
    by_name = {name.lower(): column for name, column in columns.items()}
    for field, name in provenance.columns.items():
        column = by_name.get(name.lower(), SourceColumn(name, "the table has no such column"))
        why = column.absent or column.unmarked
        if column.is_generated:
            why = "it is generated, and the log has none of its values"
        if why is not None:
            found = f"{why}, so {field} of the provenance would be its default"
            advice = None if column.sql else "Give another column in `provenance` of its Table."
            yield Finding(f"column {table}.{name}", "fail", found, column.sql, advice)


def _as_set(table: str, column: SourceColumn, settings: Mapping[str, str]) -> SourceColumn:
    """The column, absent where the connector's settings leave it out."""
    if column.is_generated:
        return column
    for name, wanted in (("column.include.list", True), ("column.exclude.list", False)):
        listed = settings.get(name, "").split(",")
        is_named = any(_matches(each, f"{table}.{column.name}") for each in listed)
        if name in settings and is_named is not wanted:
            return replace(column, absent=f"{name} of the connector leaves it out", unmarked=None)
    return column


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern.strip(), name, re.IGNORECASE) is not None
    except re.error:
        return False


def _column(table: str, column: SourceColumn, field: str | None) -> Iterator[Finding]:
    """What is wrong with a column, and with the field that has its values."""
    whole = f"{table}.{column.name}"
    if column.stops is not None:
        advice = "Give it another type, or capture a table with another type that it is copied to."
        yield Finding(f"column {whole}", "fail", column.stops, advice=advice)
    elif column.is_generated and field is None:
        yield Finding(f"generated column {whole}", "ok", "left out: the log has none of them")
    elif column.is_generated:
        found = f"the log has none of them, so field {field} would never have a value"
        advice = f"Declare the Table of {table} with computed={{{field!r}: …}}, a function of the "
        advice += f"state, or leave the column out with drop=({column.name!r},)."
        yield Finding(f"generated column {whole}", "fail", found, advice=advice)
    elif column.absent is not None and field is not None:
        found = f"{column.absent}, so field {field} would never have its value"
        remove = f"Remove the field, or leave it out: drop=({column.name!r},)."
        yield Finding(f"column {whole}", "fail", found, column.sql, None if column.sql else remove)
    elif column.absent is None and column.unmarked and (field or column.is_required):
        found = f"{column.unmarked}; Debezium would write null"
        found += ", and fail because the column is NOT NULL" if column.is_required else ""
        yield Finding(f"column {whole}", "fail", found, column.sql, _APART)


def _misread(
    table: str, column: SourceColumn, field: str, mapping: TableMapping
) -> Iterator[Finding]:
    """What is wrong when the field takes the column's numbers for days or times that they are not.

    A field takes whole numbers for days or times only where that is declared.
    """
    declared = {name.lower(): kind for name, kind in mapping.table.types.items()}
    kind, wanted = declared.get(column.name.lower()), mapping.model_fields.get(field)
    tree = None if wanted is None else wanted.tree
    if column.is_reformatted and kind is None and tree is not None and inferred(tree, "ms") is None:
        found = f"a change may have another text than a snapshot has, so field {field} would change"
        advice = f"Declare types={{{column.name!r}: 'json'}} of its Table, which gives the field "
        advice += "JSON in one form; or make the field a model, a dict or a list."
        yield Finding(f"column {table}.{column.name}", "fail", found, advice=advice)
    reading = reads_as(kind, tree)
    is_declared = column.numbers == "numbers" and kind is not None
    if column.numbers is None or is_declared or reading in (None, column.numbers):
        return
    found = f"its values are {column.numbers}, and field {field} would take them for {reading}"
    advice = f"Give the field the column's type, or declare types={{{column.name!r}: …}} of its "
    advice += "Table: the unit of a number ('s', 'ms', 'us', 'ns' or 'days'), or a function."
    yield Finding(f"column {table}.{column.name}", "fail", found, advice=advice)


def plugin_findings(kind: str, url: str) -> list[Finding]:
    """Whether Debezium on the Connect cluster at ``url`` loses no rows when it is stopped."""
    wanted, name = SAFE_VERSIONS.get(kind), "Debezium's plugin"
    if wanted is None:
        return []
    try:
        version = Connect(url).plugin_version(CLASSES[kind])
    except EverstateError as error:
        return [Finding(name, "warn", error.message, advice=error.advice)]
    if version is None:
        return [Finding(name, "fail", f"{url} has none for {kind}")]
    is_safe = tuple(int(part) for part in re.findall(r"[0-9]+", version)[:2]) >= wanted
    loses = f"{version} loses rows when it is stopped within a COPY (debezium/dbz#1554)"
    advice = f"Install {'.'.join(map(str, wanted))} or later on the Connect cluster."
    return [verdict(name, version if is_safe else loses, is_safe, advice=advice)]
