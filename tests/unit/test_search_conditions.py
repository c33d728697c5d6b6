"""A search's conditions mean what those of every other read of a view mean."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import BaseModel

from everstate.app import App
from everstate.errors import InvalidQuery
from everstate.serving.snapshots import Standpoint
from everstate.serving.view_rows import RowsQuery, _Shown

COLUMNS = [("notes", "kind", "text"), ("notes", "size", "bigint"), ("notes", "_words", "tsvector")]


class Note(BaseModel):
    note_id: str
    kind: str | None
    size: int
    text: str


class Asked:
    """A connection that tells the columns of a view, and keeps what was asked."""

    def __init__(self) -> None:
        self.text, self.values = "", list[Any]()

    def execute(self, query: Any, values: Any, **_: Any) -> Any:
        if b"pg_attribute" in query:
            return COLUMNS
        self.text, self.values = query.decode(), values
        return SimpleNamespace(fetchall=list)


def asked(*where: str) -> Asked:
    app, connection = App("desk"), Asked()
    app.entity("note", key="note_id")(Note)
    app.view("notes", sql="SELECT note_id, kind, size, text FROM note", search=("text",))
    meaning = app.views["notes"].fingerprint
    version: Any = SimpleNamespace(version=1, fingerprint=meaning, store="postgresql")
    seen = Standpoint(version, {}, has_deferred=False)
    shown = _Shown("views", app, "notes", cast("Any", connection), seen)
    shown.found(RowsQuery(where=where, limit=5), "late")
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
    # A column of that type is compared as it is.
    column = {"text": '"kind"', "bigint": '"size"', "numeric": '"size"::numeric'}[of]
    assert f"{column} {written} %s::{of}" in found.text


@pytest.mark.parametrize(
    ("condition", "said"),
    [("knid=a", "Did you mean kind"), ("size=many", "whole number"), ("kind", "cannot be read")],
)
def test_a_search_refuses_a_condition_with_the_reason(condition: str, said: str) -> None:
    with pytest.raises(InvalidQuery) as refused:
        asked(condition)
    assert said in f"{refused.value.message} {refused.value.advice}"
