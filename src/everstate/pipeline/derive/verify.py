"""The proof of a derived topic: its records against the accepted changes of the archive.

Which changes must be in the topic, and which version of an entity is joined, is computed in batch;
a record is checked by applying its content, with another library than the one that made it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import jsonpatch
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from everstate.changes import EntityType
from everstate.changes.derived import (
    BARRIER,
    KIND,
    OFFSET,
    PROVENANCE,
    VERSION,
    Derivation,
    JoinedStream,
    Patches,
    derivation_of,
    read_message,
)
from everstate.changes.json_numbers import decode, encode, encode_sorted
from everstate.changes.keys import OwnKey
from everstate.config import Config
from everstate.errors import NotFound, Unavailable
from everstate.log.derived import DerivedNote
from everstate.log.positions import Offsets, Range
from everstate.log.publisher import read_progress
from everstate.log.topics import TopicNames
from everstate.pipeline.batch.accepted import Places, accepted_changes, only_changes
from everstate.pipeline.batch.awaiting import await_archive
from everstate.pipeline.batch.rules import fires
from everstate.pipeline.keeping.spans import ArchivedOffsets
from everstate.pipeline.reports import DIFFERENCES_MAX, RowDifference, ViewReport
from everstate.pipeline.spark.archived import read_archive
from everstate.pipeline.spark.session import spark_errors
from everstate.pipeline.spark.source import read_ranges
from everstate.views.control import opened_control
from everstate.views.project import Project

_QUIET_S: Final = 30.0
_RAW: Final = (
    "it is a raw topic, which is made from the log and cannot be compared with accepted changes"
)
_JUDGED: Final = (
    *("key", "version", "raw_key", "raw_value", "partition", "offset", "batch"),
    *("found", "found_at", "found_key", "found_version"),
    *("found_id", "found_kind", "found_provenance"),
)
_WRONG_DDL: Final = "key string, reason string, expected string, kept string"


def verify_topic(
    spark: SparkSession, config: Config, project: Project, derivation: Derivation
) -> ViewReport:
    """Prove the published version of a derived topic, but for records that retention deleted.

    Waits for the archive. Raises NotFound for a topic that is not published or is raw, Unavailable.
    """
    began = time.monotonic()
    name, entity = derivation.name, derivation.entity
    version, position, spans = _stand(config, name)
    with opened_control(config) as control:
        row = next((row for row in control.versions(name) if row.version == version), None)
        if row is None or derivation.is_raw:
            raise NotFound(
                f"derived topic {name}: "
                f"{_RAW if derivation.is_raw else 'its definition was deleted'}."
            )
        of = derivation_of(name, row.definition)
        refused = {each: control.dead_places(each) for each in project.entities}
        read = {entity: None, getattr(of.form, "to", entity): None}
        if reasons := tuple(why for each in read for why in not_archived(config, each)):
            return ViewReport(name, version, entity, "not compared", not_compared=reasons)
        await_archive(config, entity, {(1, p): at for p, at in position.items()})
        with spark_errors(f"verifying {name}"):
            topic = TopicNames(config.log.prefix).derived(name, version)
            found = _found(spark, config, topic, spans)
            changes = _accepted_in_order(
                spark, config, project.entities[entity], position, refused[entity]
            )
            if of.trigger is not None:
                changes = changes.where(fires(of.trigger))
            beside = found.join(changes, ["partition", "offset"], "full_outer")
            if isinstance(of.form, JoinedStream):
                beside = _with_batch(spark, config, project, of.form, beside, refused[of.form.to])
            wrong, counts = _judge(beside, of, any(span.start for span in spans.values()))
    return ViewReport(
        name=name,
        version=version,
        entity=entity,
        outcome="differs" if wrong else "holds",
        expected_rows=counts["expected"],
        kept_rows=counts["kept"],
        different_rows=len(wrong),
        differences=tuple(wrong),
        as_read="not compared: it is a topic",
        position={f"1/{partition}": at for partition, at in position.items()},
        seconds=time.monotonic() - began,
    )


def not_archived(config: Config, entity: str) -> tuple[str, ...]:
    """Why changes of an entity type cannot be compared at all; empty when they can."""
    if ArchivedOffsets(config).of(entity).is_whole:
        return ()
    return (f"{entity}: its archive lacks the first changes of the log",)


def _stand(config: Config, name: str) -> tuple[int, dict[int, int], dict[int, Range]]:
    """Published version, position, and the topic's offsets, as of one moment between batches."""
    deadline = time.monotonic() + _QUIET_S
    while True:
        before = read_progress(config, f"derive-{name}")
        note = None if before is None else DerivedNote.read(before.note)
        if note is None or note.published is None:
            raise NotFound(
                f"derived topic {name} is not published yet.",
                advice="`everstate views list` shows its state.",
            )
        topic = TopicNames(config.log.prefix).derived(name, note.published)
        with Offsets(config) as offsets:
            begins, ends = offsets.beginnings([topic]), offsets.stable_ends([topic])
            # The progress may be visible before the records of the same transaction are.
            is_decided = ends == offsets.high_watermarks([topic])
        if is_decided and read_progress(config, f"derive-{name}") == before:
            spans = {part: Range(begins[topic, part], end) for (_, part), end in ends.items()}
            return note.published, note.versions.get(note.published, {}), spans
        if time.monotonic() > deadline:
            raise Unavailable(
                f"derived topic {name} changed too fast to be compared; run the proof again."
            )


def _found(
    spark: SparkSession, config: Config, topic: str, spans: Mapping[int, Range]
) -> DataFrame:
    """The topic's records: of each its place, its value, and what it says of its change."""
    headers = F.map_from_entries("headers")

    def told(name: str) -> Column:
        return F.col("header_map")[name].cast("string")

    records = read_ranges(spark, config, {topic: spans}).withColumn("header_map", headers)
    records = records.where(~F.map_contains_key("header_map", F.lit(BARRIER)))
    return records.select(
        "partition",
        told(OFFSET).cast("long").alias("offset"),
        told(VERSION).cast("long").alias("found_version"),
        told("ce_id").alias("found_id"),
        told(KIND).alias("found_kind"),
        told(PROVENANCE).alias("found_provenance"),
        F.col("key").alias("found_key"),
        F.col("value").alias("found"),
        F.col("offset").alias("found_at"),
    )


def _accepted_in_order(
    spark: SparkSession,
    config: Config,
    entity_type: EntityType,
    vector: Mapping[int, int],
    refused: Places,
) -> DataFrame:
    """Accepted changes below a vector, partition by partition in the order of acceptance.

    A held change was accepted with the change that released it: at the highest offset of its key's
    versions up to its own.
    """
    positions = {(1, partition): offset for partition, offset in vector.items()}
    archive = read_archive(spark, config, entity_type)
    changes = only_changes(accepted_changes(archive, positions, refused))
    upto = Window.partitionBy("key").orderBy("version")
    return changes.withColumn("accepted_at", F.max("offset").over(upto))


def _with_batch(
    spark: SparkSession,
    config: Config,
    project: Project,
    form: JoinedStream,
    beside: DataFrame,
    refused: Any,
) -> DataFrame:
    """Adds the joined entity's version that the batch finds at the position in each record."""
    joined_schema = "struct<joined: struct<position: map<string, long>>>"
    asked_key = _Asked(form, form.own_key(project.entities))
    to_key = F.udf(asked_key, "string", useArrow=False)
    asked = beside.where("found IS NOT NULL AND raw_value IS NOT NULL").select(
        "partition",
        "offset",
        to_key("raw_value").alias("to_key"),
        F.col("occurred_at").alias("at"),
        F.from_json(F.col("found").cast("string"), joined_schema)["joined"]["position"].alias(
            "known"
        ),
    )
    vector = ArchivedOffsets(config).of(form.to).position
    past = _accepted_in_order(spark, config, project.entities[form.to], vector, refused).select(
        F.col("key").alias("to_key"),
        F.col("version").alias("to_version"),
        F.col("partition").cast("string").alias("to_partition"),
        "accepted_at",
        "as_of",
        F.col("raw_value").alias("to_raw"),
    )
    then = (
        asked.join(past, "to_key")
        .where("accepted_at < known[to_partition] AND as_of <= at")
        .groupBy("partition", "offset")
        .agg(F.max_by(F.struct("to_version", "to_raw"), "to_version").alias("batch"))
    )
    return beside.join(then, ["partition", "offset"], "left")


class _Asked:
    """Finds the key of the entity that a record is joined with; pickled to the executors."""

    def __init__(self, form: JoinedStream, own_key: OwnKey) -> None:
        self._form, self._own_key = form, own_key

    def __call__(self, value: bytes) -> str | None:
        wanted = self._form.wanted(self._own_key, read_message(bytes(value)))
        return None if wanted is None else wanted[0]


def _judge(
    beside: DataFrame, derivation: Derivation, is_cut: bool
) -> tuple[list[RowDifference], dict[str, int]]:
    """Records that are missing, duplicate, out of order, of no accepted change, or wrong.

    Second: the row counts.
    """
    if "batch" not in beside.columns:
        none = F.lit(None).cast("struct<to_version: long, to_raw: binary>")
        beside = beside.withColumn("batch", none)
    if is_cut:
        # Retention may have deleted the records of changes that were accepted before the
        # first record that the topic still has.
        first = beside.where("found IS NOT NULL").groupBy("partition")
        kept_from = first.agg(F.min("accepted_at").alias("kept_from"))
        beside = beside.join(kept_from, "partition", "left")
        beside = beside.where("found IS NOT NULL OR accepted_at >= kept_from")
    rows = beside.select(*_JUDGED).cache()
    twice = rows.where("found IS NOT NULL").groupBy("partition", "offset").count()
    doubled = [
        RowDifference(
            f"{row['partition']}@{row['offset']}", "one record", f"{row['count']} records"
        )
        for row in twice.where("count > 1").limit(DIFFERENCES_MAX).collect()
    ]
    before = Window.partitionBy("partition", "key").orderBy("found_at")
    follows = rows.where("found IS NOT NULL AND raw_value IS NOT NULL").select(
        "key", "version", F.lag("version").over(before).alias("before")
    )
    unordered = [
        RowDifference(
            f"{row['key']}: out of order", str(row["version"]), f"it comes after {row['before']}"
        )
        for row in follows.where("before > version").limit(DIFFERENCES_MAX).collect()
    ]
    judged = rows.mapInArrow(_Judge(derivation), _WRONG_DDL).limit(DIFFERENCES_MAX).collect()
    totals = rows.agg(
        F.count("raw_value").alias("expected"), F.count("found").alias("kept")
    ).collect()[0]
    rows.unpersist()
    wrong = [RowDifference(f"{w['key']}: {w['reason']}", w["expected"], w["kept"]) for w in judged]
    return [*doubled, *unordered, *wrong], {"expected": totals["expected"], "kept": totals["kept"]}


_Difference: TypeAlias = Callable[..., dict[str, str | None]]


class _Judge:
    """Finds what is wrong with records; pickled to the executors."""

    def __init__(self, derivation: Derivation) -> None:
        self._derivation = derivation

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            wrong = [found for row in batch.to_pylist() if (found := self._wrong(row))]
            yield pa.RecordBatch.from_pylist(
                wrong,
                schema=pa.schema(
                    [(name, pa.string()) for name in ("key", "reason", "expected", "kept")]
                ),
            )

    def _wrong(self, row: Mapping[str, Any]) -> dict[str, str | None] | None:
        def difference(
            reason: str, expected: Any = None, kept: Any = None
        ) -> dict[str, str | None]:
            texts = [None if part is None else encode(part).decode() for part in (expected, kept)]
            key = row["key"] or f"{row['partition']}@{row['offset']}"
            return {"key": key, "reason": reason, "expected": texts[0], "kept": texts[1]}

        if row["raw_value"] is None:
            return difference("a record without an accepted change", None, row["found_version"])
        message = decode(row["raw_value"])
        original = message.get("originalEntityState")
        current = message.get("currentEntityState")
        form = self._derivation.form
        if row["found"] is None:
            if form.kind == "notices" and original is None:
                return None
            return difference("missing", message["version"])
        if row["found_version"] != row["version"]:
            return difference("another version", row["version"], row["found_version"])
        if row["found_key"] != row["raw_key"]:
            return difference("another key", _text(row["raw_key"]), _text(row["found_key"]))
        told = [row["found_id"], row["found_kind"], decode(row["found_provenance"] or "null")]
        wanted_pieces = [message.get(name) for name in ("id", "kind", "provenance")]
        if not _are_equal(told, wanted_pieces):
            return difference("of another change", wanted_pieces, told)
        found = decode(row["found"])
        if isinstance(form, Patches):
            made = jsonpatch.JsonPatch(found).apply(original)
            return (
                None
                if _are_equal(made, current)
                else difference("the patch is wrong", current, made)
            )
        if isinstance(form, JoinedStream):
            return _wrong_join(form, row, found, current, difference)
        wanted = {"key": row["key"], "old": original, "new": current}
        return None if _are_equal(found, wanted) else difference("different", wanted, found)


def _wrong_join(
    form: JoinedStream, row: Mapping[str, Any], found: Any, current: Any, difference: _Difference
) -> dict[str, str | None] | None:
    if not _are_equal(found[form.entity], current):
        return difference("another record", current, found[form.entity])
    if found["joined"] is None:
        return (
            None if row["batch"] is None else difference("not joined", row["batch"]["to_version"])
        )
    batch = row["batch"] or {"to_version": 0, "to_raw": b'{"currentEntityState":null}'}
    if batch["to_version"] != found["joined"]["version"]:
        return difference("another version", batch["to_version"], found["joined"]["version"])
    state = decode(batch["to_raw"]).get("currentEntityState")
    is_same = _are_equal(state, found[form.to])
    return None if is_same else difference("another state", state, found[form.to])


def _text(key: bytes | None) -> str | None:
    return None if key is None else bytes(key).decode(errors="replace")


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal; to Python 1, 1.0 and True are."""
    return encode_sorted(one) == encode_sorted(other)
