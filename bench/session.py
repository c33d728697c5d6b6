"""What all benches share: servers of their own, filled logs, fresh projects, one Spark session."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql
from rich.console import Console

from bench import data
from everstate.config import Config
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames, Topics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass
class Session:
    """One run of the benches; ``config`` has the servers' addresses."""

    config: Config
    repeat: int
    quick: bool
    console: Console
    data_dir: Path | None = None
    """Folder of real files (EVERSTATE_BENCH_DATA)."""
    servers: Mapping[str, int] = field(default_factory=dict)
    """Process of each server by name."""
    _filled: dict[int, Config] = field(default_factory=dict)

    def size(self, full: int) -> int:
        """So many changes, or a twenty-fifth of them in a quick run."""
        return full // 25 if self.quick else full

    @cached_property
    def spark(self) -> SparkSession:
        """The Spark session of the run."""
        from everstate.pipeline.spark.session import spark_session

        return spark_session(self.config, app_name="everstate-bench")

    def close(self) -> None:
        """Stop Spark when it was started."""
        if "spark" in self.__dict__:
            self.spark.stop()

    def say(self, text: str) -> None:
        """Tell what is measured now."""
        self.console.print(text, highlight=False)

    def fresh(self, base: Config | None = None) -> Config:
        """A project with nothing in it: its own topics, database and archive.

        ``base`` gives the topics instead: their changes are read by a new store of views.
        """
        name = f"bench_{uuid.uuid4().hex[:10]}"
        config = base or self.config
        address = self.config.store_dsn
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        log = config.log if base else config.log.model_copy(update={"prefix": name})
        store = config.store.model_copy(update={"dsn": f"{address.rpartition('/')[0]}/{name}"})
        archive = config.archive.model_copy(
            update={"path": str(config.project.data_dir / "lakes" / name)}
        )
        return config.model_copy(update={"log": log, "store": store, "archive": archive})

    def drop(self, config: Config) -> None:
        """Drop a fresh project's database: a full disk would spoil later runs."""
        name = sql.Identifier(config.store_dsn.rpartition("/")[2])
        with psycopg.connect(self.config.store_dsn, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(name))

    def filled(self, count: int) -> Config:
        """A project whose changelog holds the first ``count`` generated changes; made once."""
        if count not in self._filled:
            config = self.fresh()
            self.say(f"[dim]filling a log with {count:,} changes[/dim]")
            with Topics(config) as topics:
                topics.ensure([data.ENTITY])
            topic = changes_topic(config)
            with Producer(config) as producer:
                for index in range(count):
                    key, value, headers = data.message(index)
                    producer.send_raw(topic, key, value, headers)
            self._filled[count] = config
        return self._filled[count]

    def alternate(
        self,
        floor: Callable[[], float],
        ours: Callable[[], float],
        *,
        warm: int = 1,
    ) -> tuple[list[float], list[float]]:
        """Run floor and ours by turns ``repeat`` times; returns (ours, floors).

        ``warm`` rounds of both are thrown away first: Java takes two to four to compile itself.
        """
        values: list[float] = []
        floors: list[float] = []
        for run in range(-warm, self.repeat):
            gc.collect()
            beneath = floor()
            gc.collect()
            value = ours()
            self.say(
                f"[dim]  {'warm-up' if run < 0 else f'run {run + 1}'}: {value:,.4g} "
                f"beside {beneath:,.4g}[/dim]"
            )
            if run >= 0:
                values.append(value)
                floors.append(beneath)
        return values, floors


def changes_topic(config: Config) -> str:
    """The changelog of the generated purchases."""
    return TopicNames(config.log.prefix).changes(data.ENTITY)
