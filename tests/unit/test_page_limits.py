"""A number in a query is read whole: zeros before it or thousands of digits change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everstate.api.reading import Reading
from everstate.api.view_reading import ViewReading
from everstate.config import load
from everstate.console.views import rows_page
from everstate.errors import InvalidQuery

NOTHING: Any = SimpleNamespace(caller=SimpleNamespace(mask=None))
"""Stands in for what no question with a wrong number gets to."""

LONG = [f"{'0' * zeros}1{'9' * nines}" for zeros in (8, 19) for nines in (8, 4400)]
"""Numbers whose first 9 or 20 digits are a small number."""

Ask = Callable[[Path, str], object]


def a_list_of_changes(folder: Path, number: str) -> object:
    return Reading(load(folder), NOTHING).written(NOTHING, {"limit": number}, "guest")


def a_view(folder: Path, number: str) -> object:
    return ViewReading(load(folder), NOTHING, NOTHING).rows(NOTHING, {"limit": number}, "late")


def a_history(folder: Path, number: str) -> object:
    reading = Reading(load(folder), NOTHING)
    return reading.history(NOTHING, {"limit": number}, "guest", "g1")


def a_page_of_the_console(_folder: Path, number: str) -> object:
    return rows_page(NOTHING, "late", (), {"page": number})


@pytest.mark.parametrize("ask", [a_list_of_changes, a_view, a_history, a_page_of_the_console])
@pytest.mark.parametrize("number", ["0", "-1", "x", "\u0661", "9" * 20, *LONG])
def test_a_number_out_of_range_is_refused(tmp_path: Path, ask: Ask, number: str) -> None:
    with pytest.raises(InvalidQuery, match="expected"):
        ask(tmp_path, number)
