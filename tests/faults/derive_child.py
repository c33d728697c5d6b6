"""A process that keeps a derived topic until it is killed; its app is the test's, too."""

from __future__ import annotations

import sys
import threading

from pydantic import BaseModel

from everstate.app import App
from everstate.changes.derived import patch_of
from everstate.config import Config
from everstate.pipeline.derive.deriver import Deriver

app = App("derived_under_fault")


@app.entity("crate", key="crate_id", history=False)
class Crate(BaseModel):
    """Something whose state changes."""

    crate_id: str
    place: str | None = None
    parts: list[int] = []


derivation = app.derive("crate_patches", patch_of("crate"))


def main() -> None:
    """Run until the end comes from outside."""
    config = Config.model_validate_json(sys.stdin.read())
    deriver = Deriver(config, app, derivation)
    deriver.open()
    deriver.run(threading.Event())


if __name__ == "__main__":
    main()
