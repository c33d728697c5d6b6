"""The table of types holds in every way that needs no server; its page is generated from it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pyarrow as pa
import pytest
from pydantic import create_model

from everstate.changes import Change, ChangeCodec, EntityType, Kind, Provenance
from everstate.changes.json_numbers import decode
from everstate.changes.row_json import row_json
from everstate.declarations.captures import Capture, Table
from everstate.declarations.commands import CommandGroup
from everstate.errors import EverstateError, InvalidChange
from everstate.pipeline.proof.row_texts import fragments, kept_fragments
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.reading import RawReader, RefusedRow
from everstate.sources.crud.bodies import read_entity
from everstate.sources.stores.postgres.files import read_rows
from everstate.views.images import NEWEST
from type_table import (
    FIELD_TYPES,
    TYPE,
    WAYS_IN,
    FieldType,
    Given,
    arrow_value,
    entity_of,
    lake_value,
    same_value,
)

FORMS = {
    "maxwell": '{"type": "insert", "table": "value", "data": %s}',
    "canal": '{"type": "INSERT", "table": "value", "data": [%s]}',
    "goldengate": '{"op_type": "I", "table": "S.VALUE", "after": %s}',
    "dms": '{"data": %s, "metadata": {"operation": "insert"}}',
    "debezium": '{"op": "c", "after": %s, "source": {"connector": "other"}}',
}
Way = Callable[[EntityType, str, Path], bytes]
"""Takes a state as JSON; the state in the log, or raises."""


def by_put(entity_type: EntityType, state: str, _: Path) -> bytes:
    return entity_type.encode(entity_type.accept(decode(state)))


def by_rest(entity_type: EntityType, state: str, _: Path) -> bytes:
    return entity_type.encode(read_entity(entity_type, state.encode("utf-8", "surrogatepass")))


def by_file(entity_type: EntityType, path: Path) -> bytes:
    (row,) = read_rows(path, entity_type)
    if row.entity is None:
        raise InvalidChange(entity_type.name, None, "row", row.reason or "")
    return entity_type.encode(row.entity)


def by_json_lines(entity_type: EntityType, state: str, folder: Path) -> bytes:
    path = folder / "values.jsonl"
    path.write_text(state + "\n", "utf-8", "surrogatepass")
    return by_file(entity_type, path)


def by_csv(entity_type: EntityType, state: str, folder: Path) -> bytes:
    cell = state.partition('"v": ')[2].removesuffix("}")
    path = folder / "values.csv"
    with path.open("w", encoding="utf-8", errors="surrogatepass", newline="") as file:
        text = json.loads(cell) if cell.startswith('"') else cell
        csv.writer(file).writerows([["id", "v"], ["a", text]])
    return by_file(entity_type, path)


def by_command(entity_type: EntityType, state: str, _: Path) -> bytes:
    field: Any = entity_type.model.model_fields["v"]
    command = create_model("Do", id=(str, ...), v=(field.annotation, field))
    group = CommandGroup(entity_type, lambda *_: None, lambda old, _: old, [command])
    read = group.read("Do", state)
    return entity_type.encode(entity_type.model(**dict(read)))


def by_flat_form(entity_type: EntityType, state: str, _: Path) -> bytes:
    outcomes = {by_capture(entity_type, state, form)[0] for form in FORMS}
    assert len(outcomes) == 1, outcomes
    encoded, reason = by_capture(entity_type, state, "maxwell")
    if encoded is None:
        raise InvalidChange(entity_type.name, None, "row", reason or "")
    return encoded


def by_capture(entity_type: EntityType, state: str, form: Any) -> tuple[bytes | None, str | None]:
    """The state of a captured row, or why it is a dead letter."""
    table = Table(entity=entity_type.name, key_columns=("id",))
    capture = Capture(name="shop", kind="other", form=form, tables={"public.value": table})
    message = FORMS[form].replace("%s", state).encode("utf-8", "surrogatepass")
    (row,) = RawReader(capture, {entity_type.name: entity_type}).read("value", None, message)
    if isinstance(row, CleanRow):
        return row.state, None
    assert isinstance(row, RefusedRow)
    return None, row.reason


WAYS: dict[str, Way] = {
    "put": by_put, "REST": by_rest, "JSON lines": by_json_lines, "CSV": by_csv,
    "command": by_command, "flat form": by_flat_form,
}  # fmt: skip


def test_the_table_has_every_way_in_but_those_with_a_server() -> None:
    assert {*WAYS, "SQL emit"} == {*WAYS_IN}
    for each in FIELD_TYPES:
        for given in each.given:
            assert {*given.ways} <= {*WAYS_IN}, each.name


def outcome(way: Way, entity_type: EntityType, given: Given, folder: Path) -> str | bytes:
    """The state in the log, or why it was refused."""
    try:
        return way(entity_type, given.state, folder)
    except (EverstateError, msgspec.DecodeError) as error:
        return str(getattr(error, "problems", error))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", FIELD_TYPES, ids=lambda kind: kind.name)
def test_a_value_arrives_equal_or_is_refused_with_the_reason(
    kind: FieldType, way: str, tmp_path: Path
) -> None:
    entity_type = entity_of(kind)
    wrong = []
    for given in kind.given:
        found, reason = outcome(WAYS[way], entity_type, given, tmp_path), given.reason(way)
        if reason is None:
            is_right = isinstance(found, bytes) and same_value(kind, given.text, found)
        else:
            is_right = isinstance(found, str) and (reason is TYPE or reason in found)
        if not is_right:
            wrong.append(f"{given.text}: {found!r}, and not {reason or 'equal'}")
    assert wrong == []


def states(kind: FieldType) -> list[bytes]:
    """The states of a type's values that are not refused, as they are in the log."""
    entity_type = entity_of(kind)
    taken = [given for given in kind.given if given.reason("REST") is None]
    return [by_rest(entity_type, given.state, Path()) for given in taken]


@pytest.mark.parametrize("kind", FIELD_TYPES, ids=lambda kind: kind.name)
def test_a_value_leaves_equal(kind: FieldType) -> None:
    """From the codec, from the text that readers get, and into the lake's columns."""
    entity_type = entity_of(kind)
    for state in states(kind):
        model: Any = entity_type.validate_json(state)
        assert entity_type.encode(model) == state, "a stored state is read as it is"
        assert row_json(decode(state)) == state, "what get, history and REST answer"
        change = made(entity_type, model)
        codec = ChangeCodec(entity_type)
        current = codec.decode(codec.encode(change)[1]).current
        assert current is not None
        assert entity_type.validate(current) == model
        (column,) = [each for each in entity_type.arrow_schema if each.name == "v"]
        value = lake_value(model.v)
        assert pa.array([value], column.type).to_pylist() == [arrow_value(value, column.type)]


@pytest.mark.parametrize("kind", FIELD_TYPES, ids=lambda kind: kind.name)
def test_the_proof_tells_values_apart(kind: FieldType) -> None:
    found = states(kind)
    message = b'{"provenance":{},"currentEntityState":%b}'
    wanted = fragments(NEWEST, pa.array([message % state for state in found])).to_pylist()
    kept = pa.array([f"[{{}},{state.decode()}]" for state in found])
    assert kept_fragments(NEWEST, pa.binary(), kept).to_pylist() == wanted
    values = {json.dumps(json.loads(state, parse_float=Decimal)["v"], default=str, sort_keys=True)
              for state in found}  # fmt: skip
    assert len({*wanted}) == len(values)


def made(entity_type: EntityType, model: Any) -> Change[Any]:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return Change(
        id=UUID(int=1), entity=entity_type.name, schema_version=1, key="a", version=1,
        kind=Kind.CREATED, occurred_at=now, recorded_at=now, current=model, original=None,
        provenance=Provenance(api_version="v1", service_name="s", identifier="i"),
    )  # fmt: skip
