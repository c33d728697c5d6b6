"""What the command line says of an entity that is not in the views yet."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from everstate.app import App
from everstate.cli.standing import ahead_of_views
from everstate.config import Config, load
from everstate.declarations.source import Source
from everstate.serving import Reader
from kit.models import Visit


@pytest.mark.parametrize(
    ("source", "module", "newest", "said"),
    [
        ("store", "postgres", None, 3),
        ("store", "postgres", 3, None),
        ("cassandra", "cassandra", None, 3),
        ("cassandra", "cassandra", 2, 3),
        ("cassandra", "cassandra", 3, None),
        ("commands", "cassandra", None, None),
    ],
)
def test_a_version_that_a_store_has_and_the_views_lack_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: Source,
    module: str,
    newest: int | None,
    said: int | None,
) -> None:
    def version_of(config: Config, entity: str, key: str) -> int | None:
        return 3 if (entity, key) == ("room", "r1") else None

    monkeypatch.setattr(f"everstate.sources.stores.{module}.store.version_of", version_of)
    app = App("hotel")
    app.entity("room", key="id", source=source)(Visit)
    reader: Any = SimpleNamespace(newest_version=lambda entity, key: newest)
    assert ahead_of_views(load(tmp_path), app, cast(Reader, reader), "room", "r1") == said
    assert ahead_of_views(load(tmp_path), app, cast(Reader, reader), "room", "r2") is None
