"""The local Redis."""

from __future__ import annotations

from pathlib import Path

from redis import Redis

from everstate.config import load
from everstate.local import Stack


def test_redis_is_started_stopped_and_started_on_the_same_port(tmp_path: Path) -> None:
    """Its rows are in the project's folder; while it is down, its address is known."""
    given = load(
        tmp_path,
        log={"bootstrap_servers": "elsewhere:1"},
        store={"dsn": "host=elsewhere"},
        stores={"redis": {}},
    )
    with Stack(given) as stack:
        url = stack.resolve().stores.server("redis").url
        assert url is not None
        with Redis.from_url(url) as client:
            client.set("a", "b")
            stack.kill("redis")
            assert stack.resolve().stores.server("redis").url == url
            assert [server.state for server in stack.status()] == ["crashed"]
            assert stack.revive(["redis"]) == ["redis"]
            assert client.get("a") == b"b"
    assert [server.state for server in stack.status()] == ["stopped"]
