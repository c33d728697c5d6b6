"""The page of views in OpenSearch is done, on the node of this run."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from kit.opensearch import OpenSearchServer
from page_reader import Reader

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "views-in-opensearch.md"
OWN = "http://127.0.0.1:9200"


@pytest.mark.timeout(600)
def test_the_howto_of_views_in_opensearch_does_what_it_says(
    opensearch: OpenSearchServer, reader: Reader, tmp_path: Path
) -> None:
    """The reader's server has another port than that of the page."""
    page = tmp_path / PAGE.name
    page.write_text(PAGE.read_text("utf-8").replace(OWN, opensearch.url), "utf-8")
    try:
        assert reader.follow(page) == 7
    finally:
        reader.stop()
        httpx.delete(f"{opensearch.url}/everstate_views.*", timeout=60).raise_for_status()
