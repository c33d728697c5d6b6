"""The entity types that the shop emits; the tables are the shop's own."""

from __future__ import annotations

from pydantic import BaseModel

from everstate import App

app = App("shop")


@app.entity("purchase", key="id")
class Purchase(BaseModel):
    """Something that was bought."""

    id: str
    total: int
    paid: bool = False


@app.entity("visit", key="id", source="log")
class Visit(BaseModel):
    """A fact: somebody looked at a purchase. No table has it."""

    id: str
    purchase: str
