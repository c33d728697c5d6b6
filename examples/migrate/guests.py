"""The entity type to which the service is moved, and the first form of its table."""

from __future__ import annotations

from pydantic import BaseModel

from everstate import App

app = App("hotel")


@app.entity("guest", key="id")
class Guest(BaseModel):
    """Somebody who stays with us."""

    id: str
    name: str
    nights: int = 0
