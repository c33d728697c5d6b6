"""What `history` and `list` show of answers."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from everstate.app import App
from everstate.cli.list_ import header, names_of
from everstate.serving.differences import differences
from everstate.serving.words import differences_text, value_text

app = App("shop")


@app.entity("part", key="key")
class Part(BaseModel):
    """A model whose key is called key, as its column in the table is."""

    key: str
    name: str
    version: int = 0


@app.entity("spare", key="spare_id")
class Spare(BaseModel):
    """A model with another field that is called key."""

    spare_id: str
    key: str | None = None


def test_a_null_field_of_a_created_or_deleted_entity_is_not_listed() -> None:
    state = {"name": "Eva", "city": None}
    assert differences_text(differences(None, state)) == "name: Eva"
    assert differences_text(differences(state, None)) == "name: Eva → –"


def test_a_field_that_becomes_null_or_loses_it_is_listed() -> None:
    assert differences_text(differences({"city": "Wien"}, {"city": None})) == "city: Wien → –"
    assert differences_text(differences({"city": None}, {"city": 0})) == "city: – → 0"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (float("nan"), "NaN"),
        (float("-inf"), "-Infinity"),
        ([1.5, float("inf"), None], '[1.5,"Infinity",null]'),
        ({"a": [float("nan")]}, '{"a":["NaN"]}'),
        (0.1, "0.1"),
        ("null", "null"),
    ],
)
def test_numbers_that_json_does_not_have_are_named(value: object, shown: str) -> None:
    assert value_text(value) == shown


@pytest.mark.parametrize(
    ("entity", "fields", "shown"),
    [
        ("part", None, ["key", "_version", "name", "version"]),
        ("part", "all", ["key", "_version", "name", "version"]),
        ("part", "key, name", ["key", "version", "name"]),
        ("spare", None, ["_key", "version", "key"]),
        ("spare", "spare_id,key", ["_key", "version", "key"]),
    ],
)
def test_a_list_has_no_two_columns_of_one_name(
    entity: str, fields: str | None, shown: list[str]
) -> None:
    assert header(names_of(app, entity, fields)) == shown
