"""Ways by which values come in, for tests that what arrives is exact."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, Field

from everstate.changes import EntityType
from everstate.changes.json_numbers import decode
from everstate.errors import InvalidChange
from everstate.sources.crud.bodies import read_entity
from everstate.sources.stores.postgres.files import read_rows

Exact = Annotated[Decimal, Field(max_digits=38, decimal_places=10)]
AMOUNT = "12345678901234567890.1234567890"


class Line(BaseModel):
    price: Exact


class Sale(BaseModel):
    sale_id: str
    amount: Exact = Decimal(0)
    lines: list[Line] = []
    rates: dict[str, Exact | None] = {}
    pieces: int | None = None
    weight: float | None = None
    day: date | None = None
    at: datetime | None = None
    seen: AwareDatetime | None = None


SALE = EntityType("sale", Sale, "sale_id")


def by_rest(entity_type: EntityType, fields: str, _: Path) -> BaseModel:
    return read_entity(entity_type, f'{{"sale_id": "s1", {fields}}}'.encode())


def by_json_lines(entity_type: EntityType, fields: str, folder: Path) -> BaseModel:
    path = folder / "sales.jsonl"
    path.write_text(f'{{"sale_id": "s1", {fields}}}\n')
    (row,) = read_rows(path, entity_type)
    if row.entity is None:
        raise InvalidChange("sale", "s1", "row", row.reason or "")
    return row.entity


def by_json_lines_with_nan(entity_type: EntityType, fields: str, folder: Path) -> BaseModel:
    return by_json_lines(entity_type, f'"pieces": NaN, {fields}', folder)


def by_store(entity_type: EntityType, fields: str, _: Path) -> BaseModel:
    return entity_type.validate_json(f'{{"sale_id": "s1", {fields}}}')


def by_put(entity_type: EntityType, fields: str, _: Path) -> BaseModel:
    return entity_type.accept(decode(f'{{"sale_id": "s1", {fields}}}'))


WAYS_IN = (by_rest, by_json_lines, by_json_lines_with_nan, by_put)
