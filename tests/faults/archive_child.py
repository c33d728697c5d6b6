"""An archiver in a process of its own, to be killed: archives in small steps until it is."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from archive_cases import ORDER
from everstate.config import Config
from everstate.log.positions import Offsets
from everstate.log.topics import Topics
from everstate.pipeline.archiving.archiver import ArchivedBatch, Archiver
from everstate.pipeline.spark.session import spark_session


def main(settings: Path) -> None:
    config = Config.model_validate_json(settings.read_text())
    spark = spark_session(config)
    with Topics(config) as topics, Offsets(config) as offsets:
        archiver = TellingArchiver(spark, config, ORDER, offsets=offsets, topics=topics)
        archiver.run(threading.Event())


class TellingArchiver(Archiver):
    def step(self) -> ArchivedBatch | None:
        batch = super().step()
        if batch is not None:
            print(batch.epoch, batch.rows, flush=True)
        return batch


if __name__ == "__main__":
    main(Path(sys.argv[1]))
