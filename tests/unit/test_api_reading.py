"""What the API reads of a present state."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from everstate.api.reading import Reading
from everstate.app import App
from everstate.config import load


class Visit(BaseModel):
    """A fact."""

    id: str
    day: date
    rooms: int = 1


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        ({"id": "a", "day": "2026-01-02"}, b'{"id":"a","day":"2026-01-02","rooms":1}'),
        ({"id": "a", "day": 86400}, b'{"id":"a","day":86400}'),
        ({"id": "a", "day": "soon"}, b'{"id":"a","day":"soon"}'),
    ],
    ids=["as the model writes it", "what the model would change", "what it would refuse"],
)
def test_a_stored_event_is_read_as_it_was_written(
    stored: dict[str, Any], read: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App("hotel")
    app.entity("visit", key="id")(Visit)
    reader = SimpleNamespace(get=lambda *_, **__: SimpleNamespace(state=stored))
    reading = Reading(load(tmp_path), app)
    monkeypatch.setattr(reading, "_reader", lambda *_: reader)
    assert reading.find("visit", "a") == read
