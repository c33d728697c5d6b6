"""lake: a filled log into a lake on S3, beside the same log into a lake on disk, in one run."""

from __future__ import annotations

from bench import data
from bench.archive import COUNT, archived
from bench.report import Reach, Result, result
from bench.session import Session
from everstate.config import load
from everstate.local import Stack


def run(session: Session) -> list[Result]:
    count = session.size(COUNT)
    store = load(
        session.config.project.data_dir / "store",
        log={"bootstrap_servers": "elsewhere:1"},
        store={"dsn": "host=elsewhere"},
        archive={"path": "s3://lake", "s3": {"local": True}},
    )
    with Stack(store) as servers:
        # Spark learns of the object store when it starts, so this bench runs alone.
        session.config = session.config.replaced("archive", s3=servers.resolve().archive.s3)
        filled = session.filled(count)

        def rate(folder: str | None) -> float:
            return count / archived(session, filled, data.PURCHASE, count, lake=folder)[0]

        values, beneath = session.alternate(lambda: rate(None), lambda: rate("s3://lake"), warm=2)
    return [
        result(
            "lake",
            "Kafka → Delta on S3 (versitygw on this machine)",
            "changes/s",
            values,
            floors=beneath,
            floor_is="Kafka → Delta on disk",
            reach=Reach(ratio_min=0.7),
        )
    ]
