"""The page of views in the lake is done, in the archive of its own project."""

from __future__ import annotations

from pathlib import Path

import pytest

from page_reader import Reader

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "views-in-the-lake.md"


@pytest.mark.timeout(600)
def test_the_howto_of_views_in_the_lake_does_what_it_says(reader: Reader) -> None:
    try:
        assert reader.follow(PAGE) == 7
    finally:
        reader.stop()
