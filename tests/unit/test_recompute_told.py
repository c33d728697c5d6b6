"""What the proofs of a schedule have found is told as what it is."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from everstate.app import App
from everstate.config import load
from everstate.errors import EverstateError
from everstate.pipeline.proof import recompute as recomputing
from everstate.pipeline.reports import ViewReport
from everstate.runtime import worker


def test_a_view_that_lacks_records_is_not_said_to_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = [
        ViewReport("one", 1, "ordr", "differs"),
        ViewReport("two", 1, "ordr", "holds"),
        ViewReport("three", 1, "ordr", "not all of the log was read"),
    ]
    stop, told = threading.Event(), list[EverstateError]()

    def waiting(error: EverstateError, _: float) -> None:
        told.append(error)
        stop.set()

    monkeypatch.setattr(worker, "waits", waiting)
    monkeypatch.setattr(recomputing, "recompute", lambda *_, **__: (reports, ["one"]))
    config = load(tmp_path, views={"recompute_every_s": 0.001})
    spark: Any = None
    recomputing.ScheduledProof(spark, config, App("orders")).run(stop)
    assert [error.message for error in told] == [
        "these views differ from their definitions run in batch: one. They are built again: one. "
        "the log has records that these views lack: three."
    ]
