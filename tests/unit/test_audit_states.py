"""States of a chain are compared by their values, as the messages have them (law 3, law 5)."""

from __future__ import annotations

import json
import pickle
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, computed_field

from everstate.changes import EntityType
from everstate.pipeline.archiving.audit_states import (
    StateDigests,
    by_text,
    digested,
    state_digests,
)
from everstate.pipeline.spark.states import state_schema

Money = Annotated[Decimal, Field(max_digits=12, decimal_places=2)]


class Line(BaseModel):
    article: str
    amount: Money = Decimal(1)


class Guest(BaseModel):
    guest_id: str
    phone: str | None = None
    mobile: str | None = None
    nights: int = 0
    score: float | None = None
    paid: Money = Decimal(0)
    at: datetime | None = None
    tags: list[str | None] | None = None
    rooms: list[list[str]] | None = None
    names: dict[str, str | None] = Field(default_factory=dict)
    lines: list[Line] = []


GUEST = EntityType("guest", Guest, "guest_id")


@pytest.fixture(params=["with the model", "without the model"])
def digests(request: pytest.FixtureRequest) -> StateDigests:
    found = state_digests(GUEST if "out" not in request.param else None, state_schema(GUEST))
    made: StateDigests = pickle.loads(pickle.dumps(found))  # as Spark's tasks get it
    return made


UNEQUAL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"phone": None, "mobile": "7"}, {"phone": "7", "mobile": None}),
    ({"mobile": "7"}, {"phone": "7"}),
    ({"tags": None}, {"tags": []}),
    ({"tags": []}, {"tags": [None]}),
    ({"tags": ["a", "b"]}, {"tags": ["b", "a"]}),
    ({"rooms": [["a"], ["b"]]}, {"rooms": [["a", "b"], []]}),
    ({"names": {"a": None}}, {"names": {}}),
    ({"names": {"a": "b"}}, {"names": {"b": "a"}}),
    ({"nights": 9007199254740993}, {"nights": 9007199254740992}),
    ({"nights": 1}, {"nights": True}),
    ({"phone": "1.0"}, {"phone": "1.00"}),
    ({"lines": [{"article": "a"}]}, {"lines": [{"article": "b"}]}),
]


@pytest.mark.parametrize(("one", "other"), UNEQUAL)
def test_states_with_other_values_have_other_digests(
    digests: StateDigests, one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert digest(digests, json.dumps(one)) != digest(digests, json.dumps(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"phone":"1","mobile":"2"}', ' { "mobile" : "2", "phone" : "\\u0031" }'),
        ('{"phone":null}', "{}"),
        ('{"paid":"1.0"}', '{"paid":"1.00"}'),
        ('{"paid":"1.0"}', '{"paid":1}'),
        ('{"score":1}', '{"score":1.0}'),
        ('{"score":1e20}', '{"score":100000000000000000000}'),
        ('{"score":-0.0}', '{"score":0}'),
        ('{"nights":100}', '{"nights":1e2}'),
        ('{"at":"2026-01-01T00:00:00Z"}', '{"at":"2026-01-01T01:00:00.000+01:00"}'),
        ('{"names":{"a":"1","b":"2"}}', '{"names":{"b":"2","a":"1"}}'),
        ('{"lines":[{"article":"a","amount":"2"}]}', '{"lines":[{"amount":"2.0","article":"a"}]}'),
    ],
)
def test_states_with_equal_values_have_one_digest(
    digests: StateDigests, one: str, other: str
) -> None:
    assert digest(digests, one) == digest(digests, other)


def digest(digests: StateDigests, state: str) -> int | None:
    message = b'{"currentEntityState":%s,"originalEntityState":null}' % state.encode()
    before, after = digested(message, digests.by_values)
    assert before is None
    return after


def test_no_state_has_no_digest(digests: StateDigests) -> None:
    deleted = b'{"kind":"deleted","originalEntityState":{},"currentEntityState": null}'
    for digest in (by_text, digests.by_values):
        assert digested(deleted, digest) == (digest(b"{}"), None)
        assert digested(b"no JSON", digest) == (None, None)


class Before(BaseModel):
    guest_id: str
    city: str
    paid: Money


class After(BaseModel):
    """`city` is removed, `paid` is wider, and `stars` and `also` are new."""

    guest_id: str
    paid: Annotated[Decimal, Field(max_digits=16, decimal_places=4)]
    stars: int = 3
    also: list[str] = Field(default_factory=list)

    @computed_field
    def sign(self) -> str:
        return "*" * self.stars


def test_a_writer_of_the_new_model_chains_to_a_state_of_the_old_one() -> None:
    entity_type = EntityType("guest", After, "guest_id")
    digests = state_digests(entity_type, state_schema(EntityType("guest", Before, "guest_id")))
    old = Before(guest_id="g", city="Wien", paid=Decimal("1.10")).model_dump_json()
    read = After(**{**json.loads(old), "paid": "1.1000"}).model_dump_json()
    assert digests.by_values(old.encode()) == digests.by_values(read.encode())
    other = read.replace('"stars":3', '"stars":4')
    assert digests.by_values(old.encode()) != digests.by_values(other.encode())


def test_fields_that_a_model_keeps_though_it_does_not_know_them_are_compared() -> None:
    class Open(BaseModel):
        model_config = ConfigDict(extra="allow")
        guest_id: str

    open_type = EntityType("guest", Open, "guest_id")
    digests = state_digests(open_type, state_schema(open_type))
    assert digests.by_values(b'{"more":1}') != digests.by_values(b'{"more":2}')
    assert digests.by_values(b'{"more":1}') == digests.by_values(b'{"more":1.0}')
