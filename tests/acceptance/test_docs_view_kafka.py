"""The page of views in Kafka is done, on the Kafka of this run."""

from __future__ import annotations

from pathlib import Path

import pytest

from page_reader import Reader

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "views-in-kafka.md"


@pytest.mark.timeout(600)
def test_the_howto_of_views_in_kafka_does_what_it_says(reader: Reader) -> None:
    try:
        assert reader.follow(PAGE) == 7
    finally:
        reader.stop()
