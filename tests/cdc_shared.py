"""What becomes of the CDC messages that other systems' tests and documents use."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import create_model

from clean_cases import CONFIG, Numbered
from everstate.changes import EntityType
from everstate.declarations.captures import Capture, CaptureForm, Table
from everstate.sources.cdc.balance import NumberedBatch
from everstate.sources.cdc.reading import RawReader
from everstate.sources.cdc.rows import RawMessage, Unreadable
from everstate.sources.cdc.shapes import READERS

_KEYS = ("id", "ID", "pk", "_id", "field1")


class Told(NamedTuple):
    """What became of one message."""

    group: str
    number: int
    outcome: str
    """``change`` (with its kind), ``held``, ``refused`` or ``no change``."""
    reason: str


def messages(folder: Path) -> Iterator[tuple[str, CaptureForm, list[Any]]]:
    """Groups of messages that belong together: a file of another system, or one connector."""
    groups: dict[tuple[str, CaptureForm], list[Any]] = defaultdict(list)
    for line in (folder / "cdc_messages.jsonl").read_text("utf-8").splitlines():
        found = json.loads(line)
        form: CaptureForm = "goldengate" if found["format"] == "ogg" else "debezium"
        groups[found["file"].removeprefix("kafka/"), form].append(found["message"])
    for line in (folder / "debezium_envelopes.jsonl").read_text("utf-8").splitlines():
        found = json.loads(line)
        # Documents show a transaction's block with rows of another table than the rest.
        other = " of pk" if '"pk"' in json.dumps(found["event"]) else ""
        groups[f"docs/{found['connector']}{other}", "debezium"].append(found["event"])
    for (group, form), listed in groups.items():
        yield group, form, listed


def outcomes(group: str, form: CaptureForm, listed: list[Any]) -> list[Told]:
    """What becomes of each message of a group, taken in order by one capture."""
    columns = columns_of(form, listed)
    fields = {name: "c_" + name.lower() for name in columns}
    column = next(name for name in (*_KEYS, *sorted(columns)) if name in columns)
    model: Any = create_model(
        "Row", **dict.fromkeys(sorted(set(fields.values())), (str | None, None))
    )  # type: ignore[call-overload]
    entity = EntityType("row", model, fields[column])
    table = Table(
        entity="row",
        key_columns=(column,),
        columns=fields,
        types=dict.fromkeys(columns, "text"),
    )
    capture = Capture(
        name="shared", kind="other", form=form, tables={"rows": table}, transactions=False
    )
    numbered = Numbered(RawReader(capture, {"row": entity}), CONFIG)
    told = []
    for number, message in enumerate(listed):
        before = sum(len(one.rows) for one in numbered.held.values())
        numbered.changes = []
        body = json.dumps(_of_any_table(message)).encode()
        batch = numbered.run(numbered.read(("rows", None, body)))
        told.append(_told(group, number, batch, numbered, before))
    return told


def _told(group: str, number: int, batch: NumberedBatch, numbered: Numbered, before: int) -> Told:
    if batch.refused:
        return Told(group, number, "refused", batch.refused[0].reason)
    if numbered.changes:
        kinds = " + ".join(one.kind.value for one in numbered.changes)
        return Told(group, number, "change", kinds)
    held = numbered.held
    if sum(len(one.rows) for one in held.values()) > before:
        return Told(group, number, "held", next(iter(held.values())).reason)
    return Told(group, number, "no change", ", ".join(batch.skipped) or "nothing to read")


def _of_any_table(message: Any) -> Any:
    """The message without its table's name: those of a group are taken as rows of one table."""
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if name != "table"}


def columns_of(form: CaptureForm, listed: list[Any]) -> set[str]:
    """All columns that any message of a group names."""
    columns: set[str] = set()
    for message in listed:
        try:
            value = json.dumps(_of_any_table(message)).encode()
            rows = READERS[form](RawMessage("rows", None, value, {}))
        except Unreadable:
            continue
        for row in rows:
            columns |= {*(row.before or {}), *(row.after or {})}
    return columns or {"id"}


def table_of(told: Iterable[Told]) -> str:
    """Outcomes by reason, as a table to be read."""
    counted = Counter((one.outcome, one.reason.split(" 0x")[0][:70]) for one in told)
    lines = [
        f"{count:4} {outcome:10} {reason}" for (outcome, reason), count in sorted(counted.items())
    ]
    return "\n".join(lines)
