"""The page of views in Redis is done, on the Redis of this run."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.served_redis import ServedRedis
from page_reader import Reader

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "views-in-redis.md"


@pytest.mark.timeout(600)
def test_the_howto_of_views_in_redis_does_what_it_says(redis: ServedRedis, reader: Reader) -> None:
    reader.env = {**reader.env, "EVERSTATE_STORES_REDIS_URL": redis.url}
    try:
        assert reader.follow(PAGE) == 11
    finally:
        reader.stop()
        with redis.client() as client:
            client.flushall()
