"""Input has the names that are written, and not those of the model's attributes."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, Field

from everstate.changes import EntityType
from everstate.errors import InvalidChange


class Paid(BaseModel):
    """A model whose field is written by another name."""

    name: str
    pay: int = Field(alias="salary")


PAID = EntityType("paid", Paid, "name", 1)


def test_input_has_the_names_that_are_written() -> None:
    accepted = PAID.accept({"name": "Eva", "salary": 5})
    assert accepted == Paid(name="Eva", salary=5)
    with pytest.raises(InvalidChange, match="salary"):
        PAID.accept({"name": "Eva", "pay": 5})
