"""What a subscriber asks for, read from its parameters."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from everstate.api.subscribing import Wish
from everstate.changes import EntityType
from everstate.http.masks import NO_MASK


class Parcel(BaseModel):
    parcel_id: str
    note: str | None = None
    pieces: int | None = None


PARCEL = EntityType("parcel", Parcel, "parcel_id")


@pytest.mark.parametrize(
    ("becomes", "note"),
    [("note:null", None), ('note:"null"', "null"), ("note:late", "late"), ("note: a ", " a ")],
)
def test_a_subscriber_asks_for_null_and_for_the_text_null(becomes: str, note: str | None) -> None:
    trigger = Wish.of(PARCEL, {"becomes": becomes}, None, NO_MASK).trigger
    assert trigger is not None
    for value in (None, "null", "late", " a "):
        assert trigger.fires(PARCEL, {"note": "other"}, {"note": value}) is (value == note)


def test_a_subscriber_asks_for_a_number_and_for_none() -> None:
    for becomes, pieces in (("pieces:3", 3), ("pieces:null", None)):
        trigger = Wish.of(PARCEL, {"becomes": becomes}, None, NO_MASK).trigger
        assert trigger is not None
        assert trigger.fires(PARCEL, {"pieces": 1}, {"pieces": pieces})
