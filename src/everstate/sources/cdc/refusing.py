"""Refuses a capture whose tables cannot be captured correctly, before anything is made for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from everstate.changes import EntityType
from everstate.declarations.captures import Capture
from everstate.errors import CaptureFailed
from everstate.sources.cdc.database import Finding
from everstate.sources.cdc.mapping import TableMapping


def refuse_failed(capture: Capture, findings: Iterable[Finding]) -> None:
    """Raise CaptureFailed, with advice, when one of the findings is a failure."""
    failed = [each for each in findings if each.outcome == "fail"]
    if not failed:
        return
    lines = [" ".join([f"{f.name}: {f.found}.", *f.sql, f.advice or ""]) for f in failed]
    listed = "\n".join(f"- {line.strip()}" for line in lines)
    raise CaptureFailed(
        f"capture {capture.name}: nothing was made, because these tables cannot be "
        f"captured as they are:\n{listed}\n",
        advice=f"`everstate cdc doctor {capture.name}` shows this and all the rest.",
    )


def generated_findings(
    capture: Capture,
    entities: Mapping[str, EntityType],
    generated: Mapping[str, Sequence[str]],
) -> list[Finding]:
    """For each generated column, which the log does not contain: does a field need its values."""
    findings = []
    for table, columns in generated.items():
        declared = capture.tables[table]
        entity_type, mapping = entities.get(declared.entity), None
        if entity_type is not None:
            mapping = TableMapping(capture, table, declared, entity_type)
        for column in columns:
            name = f"generated column {table}.{column}"
            field = mapping.field_of(column) if mapping is not None else None
            if field is None:
                findings.append(Finding(name, "ok", "left out: the log has none of them"))
                continue
            found = f"the log has none of them, so field {field} would never have a value"
            advice = (
                f"Declare the Table of {table} with computed={{{field!r}: …}}, a function "
                f"of the state, or leave the column out with drop=({column!r},)."
            )
            findings.append(Finding(name, "fail", found, advice=advice))
    return findings
