"""Drift: compares the log's newest state of each entity with the source of truth, and repairs it.

Both sides are first summed by key range (count and hash), and only the ranges that differ are read
again, row by row. The log's side is `.state`, read to its end by explicit offsets. The source is
read before the log, and its changes get some time to arrive, so a change on its way is no drift.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from prometheus_client import Counter, Gauge
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from everstate.changes import EntityType
from everstate.changes.drift import Action, DriftedKey, DriftReport, Truth, What
from everstate.config import Config
from everstate.errors import EverstateError
from everstate.log.positions import Offsets, Range
from everstate.log.topics import TopicNames, Topics
from everstate.parts import PartConcern, found
from everstate.pipeline.drift import tasks
from everstate.pipeline.spark.outcomes import OUTCOME, outcomes_of
from everstate.pipeline.spark.session import spark_errors
from everstate.pipeline.spark.source import read_ranges
from everstate.runtime.worker import Worker

logger = logging.getLogger("everstate.pipeline.drift.check")

DRIFTED = Gauge(
    "everstate_drift_entities",
    "Entities that differed from the source at the last comparison",
    ["entity", "what"],
)
SHARE = Gauge("everstate_drift_share", "Share of the entities that differed, 0 to 1", ["entity"])
CHECKED = Gauge("everstate_drift_checked_seconds", "Time of the last comparison", ["entity"])
REPAIRED = Counter(
    "everstate_drift_repaired_entities", "Entities that were published again", ["entity", "how"]
)

_DRIFT: Final = (What.MISSING, What.STALE, What.DIFFERENT, What.EXTRA)


def check_drift(
    spark: SparkSession,
    config: Config,
    entity_type: EntityType,
    truth: Truth,
    *,
    repair: bool = False,
) -> DriftReport:
    """Compare one entity type's source of truth with its log; with ``repair``: repair the log.

    Below `drift.rebuild_share` only the drifted entities are published again, from that share on
    the whole entity type. Repairs go through the source's own outbox or publisher, and are in the
    log when that has published them. An entity whose state in the source would be rejected by
    the log's readers is reported, and not sent.

    Cost: one pass over both sides; where ranges differ, a second one over the source, and one over
    the log.
    """
    return _Check(spark, config, entity_type, truth).run(repair)


class _Check:
    """One comparison of one entity type."""

    def __init__(
        self, spark: SparkSession, config: Config, entity_type: EntityType, truth: Truth
    ) -> None:
        self._spark, self._config, self._truth = spark, config, truth
        self._entity_type, self._entity = entity_type, entity_type.name
        self._topic = TopicNames(config.log.prefix).state(self._entity)
        self._ranges = config.drift.ranges

    def run(self, repair: bool) -> DriftReport:
        began, checked_at = time.monotonic(), datetime.now(UTC)
        with spark_errors(f"comparing {self._entity} with its log"):
            stored, logged, differing = self._sums()
            counts: dict[str, int] = {}
            keys: tuple[DriftedKey, ...] = ()
            action: Action = "none"
            repaired = sent_again = refused = 0
            if differing:
                found = self._rows(differing)
                try:
                    of_each = found.groupBy("what").count().collect()
                    counts = {row["what"]: row["count"] for row in of_each}
                    keys = self._keys(found)
                    refused = _drifted(found).where(F.col("refused").isNotNull()).count()
                    share = self._share(counts, stored, logged)
                    if repair and share > 0:
                        action, repaired, sent_again = self._repair(found, share)
                finally:
                    found.unpersist()
        report = DriftReport(
            entity=self._entity,
            checked_at=checked_at,
            stored=stored,
            logged=logged,
            ranges=self._ranges,
            different_ranges=len(differing),
            missing=counts.get(What.MISSING, 0),
            stale=counts.get(What.STALE, 0),
            different=counts.get(What.DIFFERENT, 0),
            extra=counts.get(What.EXTRA, 0),
            pending=counts.get(What.PENDING, 0),
            share=self._share(counts, stored, logged),
            action=action,
            repaired=repaired,
            refused=refused,
            sent_again=sent_again,
            keys=keys,
            seconds=time.monotonic() - began,
        )
        _measure(report)
        return report

    def _sums(self) -> tuple[int, int, list[int]]:
        """Entities of each side, and the key ranges whose count or hash differ; one Spark job."""
        sides = {"stored": self._stored(None), "logged": self._logged(None)}
        marked = [
            side.select(F.lit(n).alias("side"), "number", "hash") for n, side in sides.items()
        ]
        # A decimal holds the sum of any number of 64-bit hashes.
        total = F.sum(F.col("hash").cast("decimal(38,0)")).alias("total")
        both = marked[0].unionAll(marked[1]).groupBy("side", "number")
        sums: dict[str, dict[int, tuple[int, int]]] = {name: {} for name in sides}
        for row in both.agg(F.count("*").alias("entities"), total).collect():
            sums[row["side"]][row["number"]] = (row["entities"], int(row["total"]))
        stored, logged = sums["stored"], sums["logged"]
        differing = [n for n in stored.keys() | logged.keys() if stored.get(n) != logged.get(n)]
        return (
            sum(entities for entities, _ in stored.values()),
            sum(entities for entities, _ in logged.values()),
            sorted(differing),
        )

    def _stored(self, ranges: Sequence[int] | None) -> DataFrame:
        """The source's entities, of some key ranges or all; each task reads one slice."""
        wanted = max(1, self._spark.sparkContext.defaultParallelism)
        pieces = self._truth.slices(wanted)
        read = tasks.reading(self._truth, pieces, self._ranges, ranges)
        # One task per slice; it gets the number of its slice.
        numbers = self._spark.range(0, len(pieces), 1, len(pieces))
        return numbers.mapInArrow(read, from_arrow_schema(tasks.SIDE))

    def _logged(self, ranges: Sequence[int] | None) -> DataFrame:
        """The log's newest change of each key, of some key ranges or all."""
        records = read_ranges(self._spark, self._config, {self._topic: self._spans()})
        decoded = records.select("key", "value", "partition", "offset").mapInArrow(
            tasks.decoding(self._ranges, ranges), from_arrow_schema(tasks.LOGGED)
        )
        side = F.struct("version", "change_id", "hash", "state")
        newest = decoded.groupBy("key", "number").agg(F.max_by(side, "offset").alias("side"))
        return newest.select("key", "number", "side.*")

    def _spans(self) -> dict[int, Range]:
        """The offsets to read of each partition; none while nobody has made the topic yet."""
        with Topics(self._config) as topics:
            if self._topic not in topics.existing():
                return {}
        with Offsets(self._config) as offsets:
            starts, ends = offsets.beginnings([self._topic]), offsets.stable_ends([self._topic])
        return {
            partition: Range(starts[topic, partition], end)
            for (topic, partition), end in ends.items()
        }

    def _rows(self, ranges: Sequence[int]) -> DataFrame:
        """Entities of these ranges that differ, and still do after a wait; a persisted frame."""
        stored = self._stored(ranges).persist()
        try:
            stored.count()
            time.sleep(self._config.drift.settle_s)
            sides = _joined(stored, self._logged(ranges))
            kind = self._entity_type
            judge = tasks.judging(self._truth, kind.own_key, kind.arrow_schema, kind.former)
            found = sides.mapInArrow(judge, from_arrow_schema(tasks.FOUND)).persist()
            found.count()
        finally:
            stored.unpersist()
        return found

    def _keys(self, found: DataFrame) -> tuple[DriftedKey, ...]:
        rows = _drifted(found).orderBy("key").limit(self._config.drift.keys_max).collect()
        return tuple(
            DriftedKey(row["key"], row["what"], row["why"], row["stored"], row["logged"])
            for row in rows
        )

    def _share(self, counts: Mapping[str, int], stored: int, logged: int) -> float:
        drifted = sum(counts.get(what, 0) for what in _DRIFT)
        return drifted / max(1, stored, logged)

    def _repair(self, found: DataFrame, share: float) -> tuple[Action, int, int]:
        """Send the drifted entities again, and then all others when the share is large."""
        repaired = self._repaired(_drifted(found).select(*tasks.DRIFTED))
        REPAIRED.labels(self._entity, "repaired").inc(repaired)
        if share < self._config.drift.rebuild_share:
            return "republished", repaired, 0
        others = self._stored(None).join(found.select("key"), "key", "left_anti")
        same = others.select(
            "key",
            F.lit(What.SAME.value).alias("what"),
            F.col("version").alias("stored"),
            F.col("version").alias("logged"),
            *(
                F.lit(None).cast("string").alias(name)
                for name in ("logged_id", "logged_state", "refused")
            ),
        )
        again = self._repaired(same)
        REPAIRED.labels(self._entity, "sent again").inc(again)
        return "rebuilt", repaired, again

    def _repaired(self, drifted: DataFrame) -> int:
        done = drifted.mapInArrow(tasks.repairing(self._truth), OUTCOME)
        return sum(each["done"] for each in outcomes_of(done))


def _drifted(found: DataFrame) -> DataFrame:
    return found.where(F.col("what").isin(*(what.value for what in _DRIFT)))


def _joined(stored: DataFrame, logged: DataFrame) -> DataFrame:
    """Keys whose sides differ, with both sides; the columns of `tasks.judging`."""
    names = ("version", "change_id", "hash")
    left = stored.select("key", *(F.col(name).alias(f"stored_{name}") for name in names))
    right = logged.select(
        "key",
        *(F.col(name).alias(f"logged_{name}") for name in names),
        F.col("state").alias("logged_state"),
    )
    both = left.join(right, "key", "full_outer")
    return both.where(~F.col("stored_hash").eqNullSafe(F.col("logged_hash"))).select(*tasks.SIDES)


def _measure(report: DriftReport) -> None:
    for what in (*_DRIFT, What.PENDING):
        DRIFTED.labels(report.entity, what.value).set(getattr(report, what.value))
    SHARE.labels(report.entity).set(report.share)
    CHECKED.labels(report.entity).set(report.checked_at.timestamp())


class ScheduledDrift(Worker):
    """Compares every `drift.every_s`, and repairs with `drift.repair`.

    An error is logged, and the comparison is made at the next time: no other part depends on it.
    """

    doing = "comparing of the sources of truth with the log"
    begins_idle = True

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        entity_types: Mapping[str, EntityType],
        truths: Mapping[str, Truth],
    ) -> None:
        self._spark, self._config = spark, config
        self._entity_types, self._truths = entity_types, truths
        self.idle_s = config.drift.every_s

    def step(self) -> None:
        """Compare each entity type once."""
        for entity, truth in self._truths.items():
            if self.stop.is_set():
                return
            try:
                report = check_drift(
                    *(self._spark, self._config, self._entity_types[entity], truth),
                    repair=self._config.drift.repair,
                )
            except EverstateError as error:
                logger.warning("the drift of %s cannot be checked now: %s", entity, error)
            else:
                _tell(report)
                found(f"drift of {entity}", finding_of(report))


def finding_of(report: DriftReport) -> PartConcern | None:
    """What needs attention after a comparison, until the next one; ``None``: nothing."""
    if not report.drifted:
        return None
    share = f"{report.drifted:,} of {report.stored:,} entities"
    why = f"{share} had drifted, and {report.repaired:,} were repaired."
    advice = f"`everstate drift check {report.entity}` lists them."
    return PartConcern(f"drift of {report.entity}:", why, advice, is_bad=not report.holds)


def _tell(report: DriftReport) -> None:
    if report.drifted:
        logger.warning(
            "%s: %d of %d entities had drifted (%d missing, %d stale, %d different, %d extra); "
            "%s; the states of %d do not fit the model",
            report.entity,
            report.drifted,
            report.stored,
            report.missing,
            report.stale,
            report.different,
            report.extra,
            report.action,
            report.refused,
        )
    else:
        logger.info("%s: no drift among %d entities", report.entity, report.stored)
