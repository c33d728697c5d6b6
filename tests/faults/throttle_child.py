"""A process that lets throttled views take what waits, until it is killed."""

from __future__ import annotations

import sys
import threading

from pydantic import BaseModel

from everstate.app import App
from everstate.config import Config
from everstate.pipeline.keeping.releasing import Releaser
from everstate.views.policies import throttle

app = App("throttled_under_fault")


@app.entity("crate", key="crate_id", history=False)
class Crate(BaseModel):
    """Something that an import and people write."""

    crate_id: str
    place: str | None = None
    weight: int = 0


slow = throttle(service_name="importer", per_second=20_000)
app.view(
    "weights",
    sql="SELECT place, count(*) AS crates, sum(weight) AS weight FROM crate GROUP BY place",
    policies=[slow],
)
app.view("heavy", sql="SELECT crate_id, weight FROM crate WHERE weight > 50", policies=[slow])


def main() -> None:
    """Run until the end comes from outside."""
    Releaser(Config.model_validate_json(sys.stdin.read()), app).run(threading.Event())


if __name__ == "__main__":
    main()
