"""A process that keeps a raw derived topic until it is killed; its app is the test's, too."""

from __future__ import annotations

import sys
import threading

from pydantic import BaseModel

from everstate.app import App
from everstate.changes.derived import patch_of
from everstate.config import Config
from everstate.roles import Role, run_roles

app = App("raw")


class Size(BaseModel):
    length: int | None = None
    unit: str | None = None


@app.entity("parcel", key="parcel_id", history=False)
class Parcel(BaseModel):
    """Something with a nested member and a list."""

    parcel_id: str
    place: str | None = None
    size: Size | None = None
    marks: list[int] = []


derivation = app.derive("parcel_patches", patch_of("parcel"), raw=True)


def main() -> None:
    """Run until the end comes from outside."""
    config = Config.model_validate_json(sys.stdin.read())
    run_roles([Role.DERIVE], config, app, threading.Event())


if __name__ == "__main__":
    main()
