"""The example's rules, told by the kit."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from everstate.testing.behaviour import Behaviour

SEATS = Path(__file__).parents[2] / "examples" / "seats"
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.fixture
def seats(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(SEATS))
    yield importlib.import_module("seats")
    del sys.modules["seats"]


def test_a_full_show_has_a_waiting_list(seats: Any) -> None:
    show = Behaviour.of(seats.app.command_groups["show"])
    opened = seats.ShowOpened(show_id="s", title="Hamlet", seats=1)
    given = show.given(opened, seats.SeatBooked(guest="eva"))
    given.when(seats.BookSeat(guest="tom")).then(seats.GuestQueued(guest="tom"))
    given.when(seats.BookSeat(guest="eva")).then_rejected(code="booked")
    given.when(seats.CancelSeat(guest="ida")).then_rejected(code="no_seat")
    given.when(seats.OfferSeat(at=NOON)).then()
    show.given().when(seats.BookSeat(guest="tom")).then_rejected(code="unknown")
    show.given(opened).when(seats.OpenShow(show_id="s", title="Lear", seats=2)).then_rejected(
        code="open"
    )


def test_an_offer_holds_its_seat_until_it_ends(seats: Any) -> None:
    show = Behaviour.of(seats.app.command_groups["show"])
    offered = seats.SeatOffered(guest="tom", until=NOON + seats.OFFER_FOR)
    freed = [
        seats.ShowOpened(show_id="s", title="Hamlet", seats=1),
        seats.SeatBooked(guest="eva"),
        seats.GuestQueued(guest="tom"),
        seats.SeatFreed(guest="eva"),
    ]
    show.given(*freed).when(seats.OfferSeat(at=NOON)).then(offered)
    held = show.given(*freed, offered)
    held.when(seats.BookSeat(guest="zoe")).then(seats.GuestQueued(guest="zoe"))
    held.when(seats.AcceptOffer(guest="zoe")).then_rejected(code="no_offer")
    held.when(seats.AcceptOffer(guest="tom")).then(seats.SeatBooked(guest="tom"))
    ended = seats.ExpireOffer(guest="tom", until=NOON + seats.OFFER_FOR)
    held.when(ended).then(seats.OfferExpired(guest="tom"))
    taken = show.given(*freed, offered, seats.SeatBooked(guest="tom"))
    taken.when(ended).then()
