"""Two releases of one service, whose models know different fields; each writes at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from pydantic import BaseModel

from everstate.changes import EntityType
from everstate.errors import InvalidChange


class OldAddress(BaseModel):
    street: str
    floor: int = 0


class NewAddress(BaseModel):
    street: str
    geo: str | None = None


class OldLine(BaseModel):
    sku: str
    amount: int = 1


class NewLine(OldLine):
    gift: str | None = None


class OldOrder(BaseModel):
    order_id: str
    weight: float | None = None
    note: str = ""
    address: OldAddress | None = None
    lines: list[OldLine] = []
    places: dict[str, OldAddress] = {}


class NewOrder(BaseModel):
    order_id: str
    tier: str | None = "basic"
    note: str = ""
    address: NewAddress | None = None
    lines: list[NewLine] = []
    places: dict[str, NewAddress] = {}


Order: TypeAlias = OldOrder | NewOrder
OLD = EntityType("order", OldOrder, "order_id")
NEW = EntityType("order", NewOrder, "order_id", 2)


class Chain(Protocol):
    """One entity that both releases write."""

    def write(self, release: EntityType, order: Order | None) -> None:
        """Store a state, or delete the entity; raises InvalidChange."""

    def stored(self) -> str | None:
        """JSON of the stored state; ``None``: there is none."""


def write_at_random(chain: Chain, seed: int, turns: int) -> tuple[int, int]:
    """Let both releases write, and check what each sees; returns how many writes were refused."""
    chosen, done, refused = random.Random(seed), 0, 0
    for _ in range(turns):
        release, other = chosen.sample((OLD, NEW), 2)
        before = chain.stored()
        if before is not None and chosen.random() < 0.03:
            chain.write(release, None)
            assert chain.stored() is None
            continue
        present = None if before is None else read(release, before)
        order = _edited(chosen, release, present)
        try:
            chain.write(release, order)
        except InvalidChange as refusal:
            refused += _check_refused(chain, release, refusal, before)
            continue
        done += 1
        after = chain.stored() or ""
        assert read(release, after) == order
        seen = None if before is None else read(other, before)
        assert read(other, after) == _seen(other, seen, order), (before, after)
    return done, refused


def _check_refused(
    chain: Chain, release: EntityType, refusal: InvalidChange, before: str | None
) -> int:
    """The older model cannot tell to which of the changed lines the gift belongs."""
    assert (release, refusal.field) == (OLD, "lines")
    assert '"gift"' in (before or "")
    assert chain.stored() == before
    return 1


def read(release: EntityType, state: str) -> Order:
    """A stored state as a release reads it."""
    made: Any = release.validate_json(state)
    return made  # type: ignore[no-any-return]


def _edited(chosen: random.Random, release: EntityType, present: Order | None) -> Order:
    """The order with one field changed, or equal to what it was."""
    model: Any = release.model
    if present is None:
        return model(order_id="o-1", note=_word(chosen))  # type: ignore[no-any-return]
    address: Any = OldAddress if release is OLD else NewAddress
    inner = {"floor": chosen.randrange(9)} if release is OLD else {"geo": _word(chosen)}
    made = address(street=_word(chosen), **inner)
    name = chosen.choice([*model.model_fields][1:])
    value: Any = chosen.choice((None, _word(chosen)))
    if name == "note":
        value = _word(chosen)
    elif name == "weight":
        value = chosen.choice((None, 0.1, 2.0, 1e21))
    elif name == "address":
        value = chosen.choice((made, present.address, None))
    elif name == "places":
        value = {**present.places, chosen.choice("abc"): made}
        value = dict(chosen.sample([*value.items()], chosen.randint(0, len(value))))
    elif name == "lines":
        value = _lines(chosen, release, present.lines)
    return present.model_copy(update={name: value})


def _lines(chosen: random.Random, release: EntityType, present: Sequence[OldLine]) -> list[OldLine]:
    lines, what = list(present), chosen.choice(("add", "take", "turn", "change", "change"))
    line: Any = OldLine if release is OLD else NewLine
    at = chosen.randrange(len(lines)) if lines else None
    if at is None or what == "add":
        more = {} if release is OLD else {"gift": _word(chosen)}
        lines.insert(at or 0, line(sku=f"s-{chosen.random()}", amount=chosen.randrange(3), **more))
    elif what == "take":
        del lines[at]
    elif what == "turn":
        lines.reverse()
    elif release is NEW and chosen.random() < 0.5:
        lines[at] = lines[at].model_copy(update={"gift": _word(chosen)})
    else:
        lines[at] = lines[at].model_copy(update={"amount": lines[at].amount + 1})
    return lines


def _seen(other: EntityType, before: Order | None, written: Order) -> Order:
    """What the other release must see after a write: what it alone knows is as it was."""
    model: Any = other.model
    address: Any = OldAddress if other is OLD else NewAddress
    line: Any = OldLine if other is OLD else NewLine

    def at(place: BaseModel, was: BaseModel | None) -> Any:
        known = {} if was is None else was.model_dump()
        return address(**{**known, "street": place.model_dump()["street"]})

    had = [] if before is None else before.lines
    lines = {each.sku: each.model_dump() for each in had}
    places: Any = {} if before is None else before.places
    was: Any = None if before is None or written.address is None else before.address
    alone = set[str]() if before is None else model.model_fields.keys() - type(written).model_fields
    return model(  # type: ignore[no-any-return]
        **{name: getattr(before, name) for name in alone},
        order_id=written.order_id,
        note=written.note,
        address=None if written.address is None else at(written.address, was),
        lines=[
            line(**{**lines.get(each.sku, {}), "sku": each.sku, "amount": each.amount})
            for each in written.lines
        ],
        places={name: at(each, places.get(name)) for name, each in written.places.items()},
    )


def _word(chosen: random.Random) -> str:
    return chosen.choice(("", "Zürich", "a\tb", "null", "\\", "1.50"))
