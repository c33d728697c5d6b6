"""The keeper prepares every entity type before anything else begins; no servers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from pydantic import BaseModel

from everstate.app import App
from everstate.config import Config, StoreConfig
from everstate.errors import Unavailable
from everstate.pipeline.keeping import keep
from everstate.pipeline.keeping.keep import Keeper

CONFIG = Config(store=StoreConfig(dsn="postgresql://127.0.0.1:1/none"))


class Thing(BaseModel):
    """An entity."""

    id: str


class Half(Keeper):
    """Its database is away when the second entity type is prepared for the first time."""

    prepared: list[str]

    def _prepare_one(self, control: Any, name: str) -> str | None:
        del control
        self._identities[name] = MagicMock()
        self.prepared.append(name)
        if self.prepared == ["first", "second"]:
            raise Unavailable("the views' database does not answer.")
        return None

    def _show_cores(self, control: Any) -> None:
        del control


def test_what_was_prepared_in_part_is_prepared_again_before_other_parts_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without it the log of an entity type that was left out would seem to have lost records."""
    app = App("shop")
    for name in ("first", "second", "third"):
        app.entity(name, key="id")(Thing)
    begun: list[bool] = []
    for name in ("Topics", "Offsets", "model_changes", "check_models", "report_misfits"):
        monkeypatch.setattr(keep, name, MagicMock())
    with Half(cast(Any, None), CONFIG, app, on_prepared=lambda: begun.append(True)) as keeper:
        keeper.prepared = []
        monkeypatch.setattr(keeper._database, "connected", lambda: nullcontext(MagicMock()))
        with pytest.raises(Unavailable):
            keeper.open()
        assert begun == []
        keeper.open()
        assert keeper.prepared == ["first", "second", "first", "second", "third"]
        assert begun == [True]
        keeper.open()
        assert len(keeper.prepared) == 5, "it is prepared once"
