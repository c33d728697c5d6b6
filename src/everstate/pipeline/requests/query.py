"""A past view, computed once and stored in a file of the project's data folder."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from everstate.archive import ArchiveLog, ArchiveReader, Ledger, last_commit
from everstate.config import Config
from everstate.pipeline.requests.moment import Moment
from everstate.private import private_folder
from everstate.views.project import Project, entities_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from everstate.pipeline.spark.progress import OnProgress

_META: Final = b"everstate"
_KEPT_MAX: Final = 100
"""Most results that are stored; the least recently used one is deleted first."""


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Rows of a past view; ``file`` has all of them as Parquet."""

    view: str
    file: Path
    rows: int
    computed_at: datetime
    position: Mapping[str, int]
    """``generation/partition`` → end offset of the changes that count; with several entity types
    the keys begin with their names."""
    from_cache: bool
    seconds: float

    def head(self, limit: int) -> pa.Table:
        """The first rows."""
        found: list[pa.RecordBatch] = []
        file = pq.ParquetFile(self.file)
        for batch in file.iter_batches(batch_size=limit):
            found.append(batch)
            if sum(each.num_rows for each in found) >= limit:
                break
        return pa.Table.from_batches(found, file.schema_arrow).slice(0, limit)


class Queries:
    """Computes past views, and reuses stored results."""

    def __init__(self, config: Config, project: Project) -> None:
        self._config, self._project = config, project

    def cached(self, view: str, moment: Moment) -> QueryResult | None:
        """A stored result that is still valid, without Spark; ``None``: it has to be computed.

        A result for a position is valid for ever. A result for a time is valid until a change is
        archived that counts at that time, such as a late report. No result is valid for the archive
        of another log. Raises UnknownView. Cost: reading the files that were archived since.
        """
        began = time.monotonic()
        file = self._file(view, moment)
        try:
            metadata = pq.read_schema(file).metadata
            summary = json.loads(metadata[_META])
        except (OSError, pa.ArrowInvalid, KeyError, TypeError):
            return None
        for entity, position in summary["positions"].items():
            if summary["topics"][entity] != self._topics(entity, position):
                return None
            if not self._holds(entity, moment, position, summary["held"].get(entity, ())):
                return None
        os.utime(file)
        return _result(view, file, summary, began, from_cache=True)

    def compute(
        self,
        spark: SparkSession,
        view: str,
        moment: Moment,
        on_progress: OnProgress = lambda _progress: None,
    ) -> QueryResult:
        """Run the view's own SQL over the changes accepted at the moment, and store the rows.

        Raises UnknownView, InvalidToken, ArchiveError, Unavailable, PipelineError.
        """
        # Imported here, because a stored result needs no Spark.
        from everstate.pipeline.requests.past import Past
        from everstate.pipeline.spark.progress import watched
        from everstate.pipeline.spark.session import spark_errors

        began = time.monotonic()
        past = Past(spark, self._config, self._project, moment, on_progress)
        file = self._file(view, moment)
        positions = {entity: past.positions(entity) for entity in entities_of(self._project, view)}
        places = {
            entity: {f"{g}/{p}": offset for (g, p), offset in each.items()}
            for entity, each in positions.items()
        }
        topics = {entity: self._topics(entity, position) for entity, position in places.items()}
        changes = sum(sum(each.values()) for each in positions.values())
        with spark_errors(f"view {view}"):
            rows = past.in_order(view)
            with watched(spark, f"computing {view}", on_progress, changes=changes, stages=2):
                table = rows.toArrow()
        summary = {
            "view": view,
            "positions": places,
            "topics": topics,
            "held": {
                entity: [f"{g}/{p}" for g, p in past.holding(entity)]
                for entity in (positions if moment.recorded_at is not None else ())
            },
            "computed_at": datetime.now(UTC).isoformat(),
            "rows": table.num_rows,
        }
        self._keep(file, table.replace_schema_metadata({_META: json.dumps(summary)}))
        return _result(view, file, summary, began, from_cache=False)

    def _holds(
        self, entity: str, moment: Moment, position: Mapping[str, int], held: Sequence[str]
    ) -> bool:
        """Whether no change that counts at the moment was archived after a position.

        ``held``: the places where changes were held then. The change that releases one may have
        been recorded at any time, so every change there counts.
        """
        if moment.position is not None:
            return True
        reader = ArchiveReader(self._config, entity)
        places = {_place(place): offset for place, offset in position.items()}
        if moment.at is not None:
            return not reader.has_since(places, "occurred_at", moment.at)
        archived = reader.position()
        is_same = all(
            archived.get(g, {}).get(p, 0) <= at
            for (g, p), at in places.items()
            if moment.recorded_at is None or f"{g}/{p}" in held
        )
        if moment.recorded_at is None or not is_same:
            return is_same
        return not reader.has_since(places, "recorded_at", moment.recorded_at)

    def _topics(self, entity: str, position: Mapping[str, int]) -> dict[str, list[str]]:
        """The archived topics of a position: generation → cluster id and topic id."""
        commit = last_commit(ArchiveLog(self._config, entity), Ledger(self._config, entity))
        known = {} if commit is None or commit.note is None else commit.note.topics
        generations = {_place(place)[0] for place in position}
        return {str(g): list(known[g]) for g in sorted(generations) if g in known}

    def _file(self, view: str, moment: Moment) -> Path:
        """The file of a result; its name is a hash of the view's meaning and the moment."""
        entity = entities_of(self._project, view)[0]
        plan = self._project.views.get(view)
        entity_type = self._project.entities[entity]
        meaning = [view, str(entity_type.arrow_schema) if plan is None else plan.fingerprint]
        meaning += ["" if plan is None else plan.sql, self._config.log.prefix]
        meaning += [self._config.archive_path, self._config.views.schema_name]
        asked = [str(each) for each in (moment.at, moment.recorded_at, moment.position)]
        name_parts = "\n".join((*meaning, *asked)).encode()
        name = f"{view}-{hashlib.blake2b(name_parts, digest_size=10).hexdigest()}.parquet"
        return Path(self._config.project.data_dir) / "queries" / name

    def _keep(self, file: Path, table: pa.Table) -> None:
        private_folder(file.parent)
        partial = file.with_suffix(f".{os.getpid()}")
        pq.write_table(table, partial, compression="zstd")
        partial.replace(file)
        kept = sorted(file.parent.glob("*.parquet"), key=lambda each: each.stat().st_mtime)
        for old in kept[:-_KEPT_MAX]:
            old.unlink(missing_ok=True)


def _place(text: str) -> tuple[int, int]:
    generation, _, partition = text.partition("/")
    return int(generation), int(partition)


def _result(
    view: str, file: Path, summary: Mapping[str, Any], began: float, *, from_cache: bool
) -> QueryResult:
    computed = datetime.fromisoformat(summary["computed_at"])
    seconds = time.monotonic() - began
    positions = summary["positions"]
    position = {
        place if len(positions) == 1 else f"{entity} {place}": offset
        for entity, each in positions.items()
        for place, offset in each.items()
    }
    return QueryResult(view, file, summary["rows"], computed, position, from_cache, seconds)
