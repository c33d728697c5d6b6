"""What a subscriber asks for, read from its parameters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import BaseModel

from everstate.api import subscribing
from everstate.api.subscribing import StreamEvent, Wish
from everstate.api.subscription_router import encoded
from everstate.changes import EntityType
from everstate.changes.tokens import Spot
from everstate.http.masks import NO_MASK
from everstate.serving.hub import Subscription


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


def test_a_subscriber_without_changes_gets_its_position_which_no_browser_takes_for_an_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subscribing, "_BEAT_S", 0.001)
    hub = cast("Any", SimpleNamespace(token_of=lambda spots: f"at-{spots[1, 0].next_offset}"))
    quiet = Subscription({(1, 0): Spot(7)}, lambda _: True, lambda: None, limit=1)
    wish = Wish.of(PARCEL, {}, None, NO_MASK)

    async def beats() -> list[Sequence[StreamEvent]]:
        live = subscribing._live(wish, hub, quiet, quiet.spots, 0, asyncio.Event())
        return [await anext(live) for _ in range(2)]

    found = asyncio.run(beats())
    assert found == [[StreamEvent("", token="at-7")]] * 2

    async def sent() -> bytes:
        async def batches() -> AsyncIterator[Sequence[StreamEvent]]:
            yield found[0]

        return b"".join([part async for part in encoded(batches())])

    assert asyncio.run(sent()).endswith(b"\n\nid: at-7\n\n")
