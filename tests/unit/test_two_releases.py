"""What a writer keeps of a state that was stored by a release with another model."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal
from uuid import UUID, uuid4

import msgspec
import pytest
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    RootModel,
    computed_field,
    model_validator,
)

from everstate.changes import ChangeCodec, EntityType, Provenance
from everstate.changes.carrying import former_names
from everstate.declarations.commands import CommandGroup
from everstate.errors import InvalidChange, InvalidEntityType
from everstate.pipeline.gaps import bridge
from everstate.sources.commands.deciding import NOTHING, Decider, RememberedEntity
from everstate.sources.commands.wire import Outcome, WireCommand, provenance_text
from everstate.sources.stores.rows import carried, kind_of, row_of
from everstate.sources.stores.store import Write
from everstate.views.gaps import Gap, GapEdges
from kit.changes import change_of
from release_cases import NEW, OLD, NewOrder, OldOrder, Order, read, write_at_random
from tiers import counted

CLERK = Provenance(api_version="v1", service_name="desk", identifier="clerk-7")
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


class StoredRows:
    """The rule of the stores, without a database."""

    def __init__(self) -> None:
        self.state: str | None = None

    def write(self, release: EntityType, order: Order | None) -> None:
        write = Write(entity=order, key="o-1", provenance=CLERK)
        row = carried(release, row_of(release, write, NOW, 24.0), self.state)
        if kind_of(release, row, self.state, force=False, limit=1_000_000) is not None:
            self.state = row.state

    def stored(self) -> str | None:
        return self.state


class Replace(BaseModel):
    """A command with a whole state, or none."""

    state: str | None


class Decided:
    """A handler of each release, with the chain of its changes."""

    def __init__(self) -> None:
        self.version = 0
        self.text: bytes | None = None

    def write(self, release: EntityType, order: Order | None) -> None:
        def evolve(_: Any, fact: Any) -> Any:
            return None if fact.state is None else release.validate_json(fact.state)

        group = CommandGroup(release, lambda _, command: command, evolve, [Replace])
        state = None if order is None else release.encode(order).decode()
        command = WireCommand(
            id=uuid4(),
            entity=release.name,
            key="o-1",
            command="Replace",
            data=msgspec.Raw(Replace(state=state).model_dump_json().encode()),
            occurred_at=NOW,
            provenance=provenance_text(CLERK),
        )
        held = NOTHING
        if self.version:
            model = None if self.text is None else release.validate_json(self.text)
            held = RememberedEntity(self.version, model, self.text)
        decided = Decider(group, message_bytes_max=1_000_000).decide(held, command, NOW)
        if decided.outcome is Outcome.PARKED:
            assert (decided.held, decided.changes) == (held, ())
            raise InvalidChange("order", "o-1", (decided.parked or "").split(": ")[2], "parked")
        for _, value, _ in decided.changes:
            change = ChangeCodec(release).decode(value)
            assert change.version == self.version + 1
            assert change.original == (None if self.text is None else json.loads(self.text))
            self.version, self.text = change.version, decided.held.text

    def stored(self) -> str | None:
        return None if self.text is None else self.text.decode()


@pytest.mark.parametrize("made", [StoredRows, Decided])
@pytest.mark.parametrize("seed", range(counted(10, full=200)))
def test_releases_that_write_at_random_keep_the_fields_of_each_other(made: Any, seed: int) -> None:
    done, refused = write_at_random(made(), seed, turns=120)
    assert done > refused


@pytest.mark.parametrize("made", [StoredRows, Decided])
def test_a_release_that_is_rolled_back_and_forward_finds_its_fields_again(made: Any) -> None:
    """A field that the newer release removed is there for the older one, and the other way."""
    chain = made()
    chain.write(OLD, OldOrder(order_id="o-1", weight=2.5))
    chain.write(NEW, NewOrder(order_id="o-1", tier="gold"))
    assert read(OLD, chain.stored()) == OldOrder(order_id="o-1", weight=2.5)
    chain.write(OLD, OldOrder(order_id="o-1", weight=3, note="back"))
    assert read(NEW, chain.stored()) == NewOrder(order_id="o-1", tier="gold", note="back")
    chain.write(NEW, NewOrder(order_id="o-1", tier=None))
    assert json.loads(chain.stored())["weight"] == 3
    chain.write(OLD, None)
    chain.write(OLD, OldOrder(order_id="o-1"))
    assert "tier" not in chain.stored()


def test_a_field_that_is_named_as_removed_is_dropped_and_comes_back_with_its_default() -> None:
    gone = EntityType("order", NewOrder, "order_id", 2, ("weight", "address.floor"))
    chain = StoredRows()
    chain.write(OLD, OldOrder.model_validate({"order_id": "o-1", "weight": 2, "address": _AT}))
    chain.write(gone, NewOrder.model_validate({"order_id": "o-1", "address": {"street": "b"}}))
    assert not {"weight", "floor"} & set((chain.stored() or "").split('"'))
    chain.write(OLD, OldOrder(order_id="o-1", weight=1))
    assert json.loads(chain.stored() or "")["tier"] == "basic"
    chain.write(gone, NewOrder(order_id="o-1", tier="gold"))
    assert read(OLD, chain.stored() or "") == OldOrder(order_id="o-1")


_AT = {"street": "a", "floor": 3}


@pytest.mark.parametrize("wrong", ["note", "lines.sku", "note.x", "lines.sku.x", "more.x", "a.b"])
def test_removed_names_only_what_no_model_has(wrong: str) -> None:
    with pytest.raises(InvalidEntityType, match="no former field"):
        EntityType("order", NewOrder, "order_id", 1, (wrong,))
    assert EntityType("order", NewOrder, "order_id", 1, ("lines.shelf", "places.floor", "x"))


def carry(model: type[BaseModel], before: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """The stored state after a write of this model, which reads it again without a loss."""
    entity_type = EntityType("thing", model, "k")
    given = entity_type.encode(entity_type.validate_json(json.dumps(state)))
    after = entity_type.carry("k", json.dumps(before), given)
    return json.loads(after)  # type: ignore[no-any-return]


@pytest.mark.parametrize("extra", ["ignore", "forbid"])
def test_what_callers_may_give_does_not_decide_what_is_kept(extra: Any) -> None:
    class Thing(BaseModel):
        model_config = ConfigDict(extra=extra)
        k: str
        n: int = 0

    kept = {"k": "k", "n": 1, "x": [1.5]}
    assert carry(Thing, {"k": "k", "x": [1.50]}, {"k": "k", "n": 1}) == kept


def test_a_model_that_forbids_unknown_fields_refuses_to_read_a_state_that_has_them() -> None:
    """So that its `PATCH` and its handler write nothing over the state."""

    class Thing(BaseModel):
        model_config = ConfigDict(extra="forbid")
        k: str

    with pytest.raises(InvalidChange, match="x"):
        EntityType("thing", Thing, "k").validate_json('{"k": "k", "x": 1}')


def test_a_model_that_holds_unknown_fields_can_take_them_away() -> None:
    class Inner(BaseModel):
        n: int = 0

    class Thing(BaseModel):
        model_config = ConfigDict(extra="allow")
        k: str
        inner: Inner = Inner()

    before = {"k": "k", "x": 1, "inner": {"n": 1, "y": 2}}
    assert carry(Thing, before, {"k": "k"}) == {"k": "k", "inner": {"n": 0, "y": 2}}

    class Outer(BaseModel):
        k: str
        own: Annotated[Thing, BeforeValidator(lambda given: given)]

    before = {"k": "k", "own": {"k": "a", "x": 1, "inner": {"n": 0}}}
    after = {"k": "k", "own": {"k": "a", "inner": {"n": 0}}}
    assert carry(Outer, before, after) == after


def test_names_of_known_fields_are_not_kept_beside_them() -> None:
    """Earlier releases wrote aliases or fields' names, and computed fields are made anew."""

    class Thing(BaseModel):
        k: str
        town: str = Field(alias="theTown", validation_alias=AliasChoices("theTown", "city"))

        @computed_field(alias="isBig")
        def big(self) -> bool:
            return self.town == "Rom"

    for name in ("theTown", "city", "town"):
        before = {"k": "k", name: "Wien", "isBig": True, "big": True, "x": 1}
        kept = carry(Thing, before, {"k": "k", "theTown": "Rom"})
        assert kept == {"k": "k", "theTown": "Rom", "isBig": True, "x": 1}


def test_a_name_that_the_code_of_a_model_reads_is_not_kept() -> None:
    """Else the value from before a rename would be read in place of the present one."""

    class Thing(BaseModel):
        k: str
        town: str | None = None
        full: str = ""

        @model_validator(mode="before")
        @classmethod
        def _renamed(cls, given: dict[str, Any]) -> dict[str, Any]:
            made = dict(given)
            if made.get("town") is None:
                made["town"] = made.pop("city", None)
            if "name" in made:
                made["full"] = made.pop("name")
            return made

    before = {"k": "k", "city": "Wien", "name": "Eva", "x": 1}
    kept = {"k": "k", "town": "Rom", "full": "Ida", "x": 1}
    assert carry(Thing, before, {"k": "k", "town": "Rom", "full": "Ida"}) == kept
    before = {"k": "k", "town": "Wien", "city": "Graz", "full": "Eva"}
    assert carry(Thing, before, {"k": "k", "town": None}) == {"k": "k", "town": None, "full": ""}


def test_a_default_that_is_another_one_at_each_reading_is_not_taken_for_a_use_of_the_name() -> None:
    class Thing(BaseModel):
        k: str
        mark: UUID = Field(default_factory=uuid4)

        @model_validator(mode="before")
        @classmethod
        def _same(cls, given: Any) -> Any:
            return given

    assert carry(Thing, {"k": "k", "x": 1}, {"k": "k"})["x"] == 1


def test_elements_of_a_list_are_found_by_what_the_model_reads() -> None:
    class Line(BaseModel):
        price: Annotated[Decimal, Field(max_digits=9, decimal_places=2)]
        amount: int = 1

    class Thing(BaseModel):
        k: str
        lines: list[Line] = []
        rows: list[dict[str, Line]] = []
        roots: RootModel[list[Line]] | None = None

    old = [{"price": "2.50", "x": 1}, {"price": "3", "amount": 1, "x": 2}]
    new = [{"price": "3.00"}, {"price": "2.5"}]
    kept = [{"price": "3.00", "amount": 1, "x": 2}, {"price": "2.5", "x": 1, "amount": 1}]
    for name, wrap in (("lines", list), ("roots", list), ("rows", _rows)):
        found = carry(Thing, {"k": "k", name: wrap(old)}, {"k": "k", name: wrap(new)})
        assert found[name] == wrap(kept)
    # One is taken out, and nothing tells which.
    twins = {"k": "k", "lines": [{"price": "1", "x": 1}, {"price": "1", "x": 2}]}
    with pytest.raises(InvalidChange) as refused:
        carry(Thing, twins, {"k": "k", "lines": [{"price": "1"}]})
    assert (refused.value.field, refused.value.key) == ("lines", "k")
    assert carry(Thing, twins, {"k": "k"})["lines"] == []
    same = {"k": "k", "lines": [{"price": "1", "x": 1}, {"price": "1", "x": 1}]}
    assert carry(Thing, same, {"k": "k", "lines": [{"price": "1"}]})["lines"][0]["x"] == 1


def _rows(lines: list[Any]) -> list[Any]:
    return [{"a": line} for line in lines]


def test_an_equal_state_of_another_release_is_no_change() -> None:
    """It gets the text that is stored, with the order of its fields and the texts of its values."""

    class Thing(BaseModel):
        k: str
        at: datetime
        kind: Literal["a"] = "a"

    entity_type = EntityType("thing", Thing, "k")
    before = '{"x":1.50,"at":"2026-01-01T01:00:00+01:00","k":"k","kind":"a","y":1e3}'
    row = row_of(entity_type, Write(entity={"k": "k", "at": NOW}, provenance=CLERK), NOW, 24.0)
    assert kind_of(entity_type, carried(entity_type, row, before), before, force=False, limit=9_999)
    assert (carried(entity_type, row, before).state or "").endswith(',"k":"k","kind":"a","y":1e3}')
    same = {"k": "k", "at": datetime.fromisoformat("2026-01-01T00:00Z")}
    row = row_of(entity_type, Write(entity=same, provenance=CLERK), NOW, 24.0)
    row = carried(entity_type, row, before)
    assert kind_of(entity_type, row, before, force=False, limit=9_999) is None
    plain = '{"order_id":"o-1","tier":"gold","note":"","lines":[],"address":null,"places":{}}'
    given = OLD.encode(OldOrder(order_id="o-1"))
    assert json.loads(OLD.carry("o-1", plain, given))["weight"] is None
    stored = OLD.carry("o-1", plain, given)
    assert OLD.carry("o-1", stored, given) == stored


class Address(BaseModel):
    place: str = Field(validation_alias=AliasChoices("place", "town"))


class Box(BaseModel):
    model_config = ConfigDict(extra="allow")


class Guest(BaseModel):
    k: str
    mail: str = Field(default="", alias="eMail")
    homes: list[Address] = []
    boxes: dict[str, Box] = {}


def test_former_names_of_fields_are_listed() -> None:
    """`emit` refuses to drop any other field (functions.sql, unknown_field)."""
    found = former_names(Guest, ["note", "homes.floor"])
    assert sorted(found) == ["boxes.*", "homes.floor", "homes.town", "mail", "note"]


def test_changes_in_place_of_missing_ones_have_the_states_on_both_sides_as_they_are() -> None:
    states = [
        {"order_id": "o-1", "tier": tier, "lines": [{"sku": "a", "gift": tier}]}
        for tier in ("gold", "basic")
    ]
    now, before = (json.dumps(state).encode() for state in states)
    held = change_of("order", "o-1", 4, now, before, who=CLERK, at=NOW, schema_version=2)
    edges = GapEdges(json.dumps(states[0]), ChangeCodec(NEW).encode(held)[1], 1, 0)
    gap = Gap("order", "o-1", 2, (4,), NOW, ())
    found = [
        ChangeCodec(OLD).decode(ChangeCodec(OLD).encode(change)[1])
        for change in bridge(gap, edges, CLERK, NOW)
    ]
    assert [change.current for change in found] == states
    assert [change.original for change in found] == [states[0], states[0]]
