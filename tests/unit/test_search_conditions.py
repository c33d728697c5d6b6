"""A search's conditions mean what those of every other read of a view mean."""

from __future__ import annotations

from typing import Any, cast

import pytest
from pydantic import BaseModel

from everstate.app import App
from everstate.errors import InvalidQuery, NoViews
from everstate.serving.connection import ReadConnection
from everstate.serving.searching import search

COLUMNS = [("notes", "kind", "text"), ("notes", "size", "bigint"), ("notes", "_words", "tsvector")]


class Note(BaseModel):
    note_id: str
    kind: str | None
    size: int
    text: str


class Asked:
    """A connection that tells the columns of a view, and keeps what was asked."""

    def __init__(self, columns: list[tuple[str, str, str]] = COLUMNS) -> None:
        self._columns = columns
        self.text, self.values = "", list[Any]()

    def execute(self, _query: Any, _parameters: Any) -> list[tuple[str, str, str]]:
        return self._columns

    def rows(self, query: Any, values: list[Any]) -> list[Any]:
        self.text, self.values = query.as_string(None), values
        return []


def asked(*where: str, columns: list[tuple[str, str, str]] = COLUMNS) -> Asked:
    app, connection = App("desk"), Asked(columns)
    app.entity("note", key="note_id")(Note)
    app.view("notes", sql="SELECT note_id, kind, size, text FROM note", search=("text",))
    plan = app.views["notes"]
    search(cast("ReadConnection", connection), "views", plan, "late", where=where, limit=5)
    return connection


@pytest.mark.parametrize(
    ("condition", "value", "written"),
    [
        ("kind=null", None, "IS NOT DISTINCT FROM"),
        ("kind!=null", None, "IS DISTINCT FROM"),
        ('kind="a"', "a", "="),
        ('kind="null"', "null", "="),
        ("kind=a ", "a ", "="),
        ("size>=3", 3, ">="),
        ("size<" + "9" * 40, int("9" * 40), "<"),
    ],
)
def test_a_search_reads_a_condition_as_other_reads_do(
    condition: str, value: Any, written: str
) -> None:
    found = asked(condition)
    assert found.values == ["late", value, 5]
    of = "text" if condition[0] == "k" else "bigint" if value == 3 else "numeric"
    assert f"::{of} {written} %s::{of}" in found.text


@pytest.mark.parametrize(
    ("condition", "said"),
    [("knid=a", "Did you mean kind"), ("size=many", "whole number"), ("kind", "cannot be read")],
)
def test_a_search_refuses_a_condition_with_the_reason(condition: str, said: str) -> None:
    with pytest.raises(InvalidQuery) as refused:
        asked(condition)
    assert said in f"{refused.value.message} {refused.value.advice}"


def test_a_search_in_a_view_that_was_never_made_says_so() -> None:
    with pytest.raises(NoViews):
        asked("kind=a", columns=[])
