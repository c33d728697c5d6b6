"""Models that several test files declare."""

from __future__ import annotations

from pydantic import BaseModel

from everstate.app import App


class Guest(BaseModel):
    guest_id: str
    city: str | None = None


class Seat(BaseModel):
    seat_id: str


class Visit(BaseModel):
    id: str


class Bell(BaseModel):
    id: str


class Ring(BaseModel):
    pass


def declare_visit(app: App) -> None:
    """An entity type of events."""
    app.entity("visit", key="id", source="log")(Visit)


def declare_bell(app: App) -> None:
    """An entity type with a command that decides nothing."""
    app.entity("bell", key="id", source="commands")(Bell)
    app.commands("bell", decide=lambda *_: None, evolve=lambda state, _: state, commands=[Ring])
