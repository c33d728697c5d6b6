"""Seat booking with a waiting list: commands, facts, two pure functions, a process manager."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from pydantic import AwareDatetime, BaseModel, Field

from everstate import App, Change, Effect, Rejected

OFFER_FOR = timedelta(minutes=15)

app = App("seats")


class Offer(BaseModel):
    """A seat that waits for somebody's yes."""

    guest: str
    until: AwareDatetime


@app.entity("show", key="show_id", source="commands")
class Show(BaseModel):
    """A show: who has a seat, to whom one is offered, who waits."""

    show_id: str
    title: str
    seats: int
    booked: list[str] = []
    offers: list[Offer] = []
    waiting: list[str] = []

    @property
    def free(self) -> int:
        """Seats that are neither booked nor offered."""
        return self.seats - len(self.booked) - len(self.offers)


# Commands: what somebody wants. Time comes with them.


class OpenShow(BaseModel):
    """Put a show on sale."""

    show_id: str
    title: str
    seats: int = Field(ge=1)


class BookSeat(BaseModel):
    """Take a seat, or a place on the waiting list when there is none."""

    guest: str = Field(min_length=1)


class CancelSeat(BaseModel):
    """Give a seat back, or leave the waiting list."""

    guest: str


class OfferSeat(BaseModel):
    """Offer a free seat to whoever waits longest."""

    at: AwareDatetime


class AcceptOffer(BaseModel):
    """Say yes to an offered seat."""

    guest: str


class ExpireOffer(BaseModel):
    """Take back an offer that nobody said yes to."""

    guest: str
    until: AwareDatetime


# Facts: what happened.


class ShowOpened(BaseModel):
    """A show is on sale."""

    show_id: str
    title: str
    seats: int


class SeatBooked(BaseModel):
    """A guest has a seat."""

    guest: str


class GuestQueued(BaseModel):
    """A guest waits."""

    guest: str


class SeatFreed(BaseModel):
    """A guest gave a seat back."""

    guest: str


class GuestLeft(BaseModel):
    """A guest no longer waits."""

    guest: str


class SeatOffered(BaseModel):
    """A guest may have a seat until then."""

    guest: str
    until: AwareDatetime


class OfferExpired(BaseModel):
    """A guest did not want it."""

    guest: str


def decide(show: Show | None, command: BaseModel) -> Any:
    """The facts that follow from a command, or why it is refused."""
    if isinstance(command, OpenShow):
        if show is not None:
            raise Rejected("the show is on sale already", code="open")
        return ShowOpened(**command.model_dump())
    if show is None:
        raise Rejected("there is no such show", code="unknown")
    match command:
        case BookSeat(guest=guest):
            return _book(show, guest)
        case CancelSeat(guest=guest):
            if guest in show.booked:
                return SeatFreed(guest=guest)
            if guest in show.waiting:
                return GuestLeft(guest=guest)
            raise Rejected(f"{guest} has no seat", code="no_seat")
        case OfferSeat(at=at):
            # Whoever was quicker has the seat: then there is nothing to offer.
            if show.free < 1 or not show.waiting:
                return None
            return SeatOffered(guest=show.waiting[0], until=at + OFFER_FOR)
        case AcceptOffer(guest=guest):
            if guest not in [offer.guest for offer in show.offers]:
                raise Rejected(f"no seat is offered to {guest}", code="no_offer")
            return SeatBooked(guest=guest)
        case ExpireOffer(guest=guest, until=until):
            return (
                OfferExpired(guest=guest)
                if Offer(guest=guest, until=until) in show.offers
                else None
            )
    raise NotImplementedError(type(command).__name__)


def _book(show: Show, guest: str) -> Any:
    if guest in show.booked:
        raise Rejected(f"{guest} has a seat", code="booked")
    if guest in show.waiting or guest in [offer.guest for offer in show.offers]:
        raise Rejected(f"{guest} is on the waiting list", code="waiting")
    if show.free > 0 and not show.waiting:
        return SeatBooked(guest=guest)
    return GuestQueued(guest=guest)


def evolve(show: Show | None, fact: BaseModel) -> Show:
    """The show after a fact."""
    if isinstance(fact, ShowOpened):
        return Show(show_id=fact.show_id, title=fact.title, seats=fact.seats)
    assert show is not None
    booked, offers, waiting = show.booked, show.offers, show.waiting
    match fact:
        case SeatBooked(guest=guest):
            booked = [*booked, guest]
            offers = [offer for offer in offers if offer.guest != guest]
        case GuestQueued(guest=guest):
            waiting = [*waiting, guest]
        case SeatFreed(guest=guest):
            booked = [each for each in booked if each != guest]
        case GuestLeft(guest=guest):
            waiting = [each for each in waiting if each != guest]
        case SeatOffered(guest=guest, until=until):
            waiting = [each for each in waiting if each != guest]
            offers = [*offers, Offer(guest=guest, until=until)]
        case OfferExpired(guest=guest):
            offers = [offer for offer in offers if offer.guest != guest]
    return show.model_copy(update={"booked": booked, "offers": offers, "waiting": waiting})


def waiting_list(change: Change[dict[str, Any]]) -> Iterator[Effect]:
    """What follows by itself: free seats are offered, and offers come to an end."""
    assert change.event is not None
    if change.event.type in ("SeatFreed", "OfferExpired"):
        yield Effect(entity="show", key=change.key, command=OfferSeat(at=change.recorded_at))
    elif change.event.type == "SeatOffered":
        until = datetime.fromisoformat(change.event.data["until"])
        expire = ExpireOffer(guest=change.event.data["guest"], until=until)
        yield Effect(
            entity="show", key=change.key, command=expire, delay=until - change.recorded_at
        )


app.commands(
    "show",
    decide=decide,
    evolve=evolve,
    commands=[OpenShow, BookSeat, CancelSeat, OfferSeat, AcceptOffer, ExpireOffer],
)
app.process("waiting_list", on=["show"], react=waiting_list)
app.view(
    "sold", sql="SELECT title, count(*) AS shows, sum(seats) AS seats FROM show GROUP BY title"
)
