"""Which changes of a model old messages allow."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, create_model

from everstate.changes import EntityType
from everstate.changes.evolution import field_changes, model_note
from everstate.views.models import note_model

Money = Annotated[Decimal, Field(max_digits=12, decimal_places=2)]
WiderMoney = Annotated[Decimal, Field(max_digits=16, decimal_places=4)]
NarrowerMoney = Annotated[Decimal, Field(max_digits=12, decimal_places=4)]
Whole = Annotated[Decimal, Field(max_digits=20, decimal_places=1)]


class Place(BaseModel):
    city: str


class WiderPlace(Place):
    floor: int | None = None


class NarrowerPlace(Place):
    floor: int


def model(**fields: Any) -> EntityType:
    made = create_model("Made", key=(str, ...), **fields)
    return EntityType("made", made, "key")


def between(one: EntityType, other: EntityType) -> dict[str, tuple[str, bool]]:
    return {c.field: (c.what, c.is_refused) for c in field_changes(model_note(one), other)}


def test_a_field_that_left_the_model_is_told_at_each_start_until_removed_names_it() -> None:
    """Writers carry it along, so that states keep it."""
    first, second = model(note=(str, ...), size=(int, 0)), model(size=(int, 0))
    noted = model_note(first)
    for _ in range(2):
        (left,) = field_changes(noted, second)
        assert (left.field, left.what, left.before) == ("note", "removed", "text")
        assert "in states until `removed` names it" in left.meaning
        noted = model_note(second, noted)
    named = replace(second, removed=("note",))
    (dropped,) = field_changes(noted, named)
    assert (dropped.field, dropped.what, dropped.is_refused) == ("note", "dropped", False)
    assert field_changes(model_note(named, noted), named) == []
    assert between(first, named) == {"note": ("dropped", False)}


@pytest.mark.parametrize("judged", [0, 7])
def test_only_a_field_that_states_may_have_is_noted_as_a_former_one(judged: int) -> None:
    stored = [model_note(model(note=(str, "")))]
    control: Any = SimpleNamespace(
        core_vector=lambda _: {0: judged},
        model=lambda _: stored[-1],
        set_model=lambda _, note: stored.append(note),
    )
    note_model(control, model())
    assert [*stored[-1].get("former", {})] == (["note"] if judged else [])


def test_a_field_that_comes_back_is_added_and_no_former_one() -> None:
    first, second = model(note=(str, "")), model()
    noted = model_note(second, model_note(first))
    (back,) = field_changes(noted, first)
    assert (back.field, back.what) == ("note", "added")
    assert model_note(first, noted) == model_note(first)


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (int, str, "widened"),
        (int, float, "widened"),
        (int, Whole, "widened"),
        (int, Money, "retyped"),
        (Money, WiderMoney, "widened"),
        (Money, NarrowerMoney, "retyped"),
        (Money, int, "retyped"),
        (str, int, "retyped"),
        (float, int, "retyped"),
        (date, datetime, "retyped"),
        (Place, WiderPlace, "widened"),
        (Place, NarrowerPlace, "retyped"),
        (WiderPlace, Place, "widened"),
        (list[int], list[str], "widened"),
        (list[str], list[int], "retyped"),
        (dict[str, int], dict[str, float], "widened"),
        (int, int | None, "optional"),
        (int | None, int, "required"),
        (int | None, str, "required"),
        (bool, str, "widened"),
    ],
)
def test_a_type_that_takes_every_old_value_is_wider(before: Any, after: Any, what: str) -> None:
    found = between(model(field=(before, ...)), model(field=(after, ...)))
    assert found == {"field": (what, what in ("retyped", "required"))}


def test_fields_that_come_and_go() -> None:
    one = model(old=(int, ...), same=(str, "x"))
    other = model(same=(str, "x"), new=(int | None, None), stars=(int, 0), must=(int, ...))
    assert between(one, other) == {
        "old": ("removed", False),
        "new": ("added", False),
        "stars": ("added", False),
        "must": ("required", True),
    }
    assert between(one, one) == {}


def test_a_refusal_says_what_to_do_instead() -> None:
    (found,) = field_changes(model_note(model(field=(str, ...))), model(field=(int, ...)))
    assert (found.before, found.after) == ("text", "integer")
    assert "keep field, add a field of the new type" in found.meaning
