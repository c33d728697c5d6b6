"""Values that do not fit the model are told wherever somebody looks: list, status, metrics."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from typer.testing import CliRunner

from everstate.attention.conditions import of_views
from everstate.cli import cli
from everstate.cli.console import AppSession
from everstate.pipeline.keeping.metrics import report_misfits
from everstate.sections import AlertsConfig
from everstate.serving.answers import ViewRow
from everstate.views.misfits import Misfit

MISFIT = Misfit("guest", "stars", 2, 1_430, "1/0/7", "1/3/99", age_s=60.0)
TEXT = "stars does not fit the model in 1,430 states of schema version 2 (first 1/0/7, last 1/3/99)"
ROW = ViewRow(
    *("guest_latest", 1, "latest", "guest", None, {}, 0, 0.0, None, None, None, "live"),
    misfits=(MISFIT,),
)


def test_status_names_field_schema_version_count_and_places() -> None:
    (found,) = of_views([ROW], AlertsConfig())
    assert found.key == "misfit:guest.stars.2"
    assert TEXT in found.why
    assert list(of_views([ROW], AlertsConfig(dead_letters_hours=0.001))) == [], "it is long ago"


def test_the_metric_counts_them_by_entity_type_field_and_schema_version() -> None:
    control: Any = SimpleNamespace(misfits=lambda: [MISFIT])
    report_misfits(control)
    labels = {"entity": "guest", "field": "stars", "schema_version": "2"}
    assert REGISTRY.get_sample_value("everstate_view_misfits", labels) == 1_430


def test_the_list_of_views_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reader:
        def __init__(self, *_: object) -> None:
            self.views = lambda: [ROW]

        def __enter__(self) -> Reader:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("everstate.cli.views.Reader", Reader)
    project = SimpleNamespace(refused_views={})
    monkeypatch.setattr(AppSession, "connected", lambda *_, **__: (None, project))
    done = CliRunner().invoke(cli, ["-C", str(tmp_path), "views", "list"])
    assert done.exit_code == 0, done.output
    assert f"misfit: guest: {TEXT}" in " ".join(done.output.split())
    assert "misfits in stars" in " ".join(done.output.split())
