"""`PUT` of a caller that does not see some fields keeps what these have."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
from pydantic import BaseModel, ConfigDict, Field

from everstate.changes import EntityType, Kind
from everstate.changes.json_numbers import decode
from everstate.errors import InvalidBody, PreconditionFailed, VersionConflict
from everstate.http.answers import HttpAnswer, HttpRequest
from everstate.http.callers import Caller
from everstate.http.masks import ALL_FIELDS, Mask
from everstate.sources.crud.resource import Resource
from everstate.sources.stores.store import Store, Versioned, Write, Written


class Pass(BaseModel):
    """A passport."""

    country: str
    number: str | None = None


class Visit(BaseModel):
    """A part in a list."""

    night: int
    price: float | None = None


class Guest(BaseModel):
    """Somebody with secrets."""

    model_config = ConfigDict(populate_by_name=True)
    id: str
    name: str
    secret: str | None = None
    pass_word: str = Field(default="none", alias="passWord")
    passport: Pass | None = None
    visits: list[Visit] = []


GUEST = EntityType("guest", Guest, "id")
MASK = Mask("guest", ("secret", "passWord", "passport.number", "visits.price"), "web")
STORED = Guest(
    id="a",
    name="p",
    secret="P-4711",
    pass_word="xyz",
    passport=Pass(country="AT", number="N1"),
    visits=[],
)


class OneGuest:
    """A store of one entity, which another writer may change first."""

    entity_type = GUEST

    def __init__(self, stored: Guest | None = STORED) -> None:
        self.stored, self.version = stored, 1
        self.overtaking: Guest | None = None

    def get(self, key: str) -> Versioned | None:
        return None if self.stored is None else Versioned(self.stored, self.version)

    def write(self, write: Write) -> Written:
        if self.overtaking is not None:
            self.stored, self.version, self.overtaking = self.overtaking, 2, None
        present = 0 if self.stored is None else self.version
        if write.expected_version is not None and write.expected_version != present:
            raise VersionConflict("guest", "a", write.expected_version, present)
        self.stored = cast(Guest, write.entity)
        self.version = present + 1
        return Written(key="a", version=self.version, kind=Kind.UPDATED, change_id=None)


def put(
    store: OneGuest, body: dict[str, Any], mask: Mask = MASK, if_match: str | None = None
) -> HttpAnswer:
    said = {"content-type": "application/json"}
    if if_match is not None:
        said["if-match"] = if_match
    encoded, caller = msgspec.json.encode(body), Caller("web", "1")
    incoming = HttpRequest("PUT", "/v1/guest/a", said, caller, encoded, mask)
    return Resource(cast(Store, store), project="p").replace(incoming, "a")


def test_hidden_fields_that_a_body_lacks_keep_their_values() -> None:
    store = OneGuest()
    put(store, {"id": "a", "name": "q", "passport": {"country": "DE"}})
    passport = Pass(country="DE", number="N1")
    assert store.stored == STORED.model_copy(update={"name": "q", "passport": passport})
    assert store.version == 2


def test_hidden_fields_that_a_body_has_are_written() -> None:
    store = OneGuest()
    passport = {"country": "AT", "number": None}
    put(store, {"id": "a", "name": "p", "secret": None, "pass_word": "new", "passport": passport})
    assert store.stored is not None
    assert (store.stored.secret, store.stored.pass_word) == (None, "new")
    assert store.stored.passport == Pass(country="AT")


def test_what_another_writer_hid_in_between_is_kept() -> None:
    store = OneGuest()
    store.overtaking = STORED.model_copy(update={"secret": "P-2"})
    put(store, {"id": "a", "name": "q", "passport": {"country": "AT"}})
    assert store.stored is not None
    assert (store.stored.secret, store.stored.name, store.version) == ("P-2", "q", 3)


@pytest.mark.parametrize(
    ("stored", "body", "where"),
    [
        ({}, {}, "passport"),
        ({}, {"passport": None}, "passport"),
        ({"visits": [Visit(night=1, price=2.5)]}, {"visits": [{"night": 1}]}, "visits"),
        ({"visits": [Visit(night=1, price=2.5)]}, {}, "visits"),
    ],
)
def test_hidden_values_that_have_no_place_in_a_body_are_not_erased(
    stored: dict[str, Any], body: dict[str, Any], where: str
) -> None:
    store = OneGuest(STORED.model_copy(update=stored))
    whole = {"id": "a", "name": "q", "passport": {"country": "AT"}, **body}
    if where == "passport" and not body:
        del whole["passport"]
    with pytest.raises(InvalidBody) as refused:
        put(store, whole)
    assert refused.value.problems == (
        (where, "has fields that this caller does not see; change the others with PATCH"),
    )
    assert store.version == 1


def test_a_list_with_all_of_its_hidden_fields_is_written() -> None:
    store = OneGuest(STORED.model_copy(update={"visits": [Visit(night=1, price=2.5)]}))
    visits = [{"night": 1, "price": 3.5}, {"night": 2, "price": None}]
    put(store, {"id": "a", "name": "p", "passport": {"country": "AT"}, "visits": visits})
    assert store.stored is not None
    assert decode(GUEST.encode(store.stored))["visits"] == visits


def test_a_caller_that_sees_all_or_nothing_replaces_all() -> None:
    for mask in (Mask("guest"), Mask("guest", (ALL_FIELDS,), "web", "read")):
        store = OneGuest()
        put(store, {"id": "a", "name": "q"}, mask)
        assert store.stored == Guest(id="a", name="q")


def test_a_new_entity_and_conditions_are_as_without_masks() -> None:
    store = OneGuest(None)
    put(store, {"id": "a", "name": "q"})
    assert store.stored == Guest(id="a", name="q")
    with pytest.raises(PreconditionFailed):
        put(store, {"id": "a", "name": "r"}, if_match=f'"7-{MASK.tag}"')
    with pytest.raises(InvalidBody):
        put(store, {"id": "b", "name": "r"})
    with pytest.raises(InvalidBody):
        put(store, {"id": "a", "name": "r", "secret": "***"})
