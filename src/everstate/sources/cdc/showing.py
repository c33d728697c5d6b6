"""Prometheus metrics about a capture's rows."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

from prometheus_client import Counter as Metric
from prometheus_client import Gauge

from everstate.sources.cdc.balance import DEAD, PUBLISHED, SKIPPED, RowCounts

logger = logging.getLogger("everstate.sources.cdc")

ROWS = Metric(
    "everstate_clean_rows",
    "Rows since the capture was cleaned first: read, deletes added, and what became of them",
    ["capture", "table", "outcome"],
)
HELD_ROWS = Gauge("everstate_clean_held_rows", "Rows that wait", ["capture", "table"])
VANISHED_ROWS = Gauge(
    "everstate_clean_vanished_rows", "Rows that were read and became nothing", ["capture", "table"]
)
COVERAGE = Gauge(
    "everstate_clean_provenance_percent",
    "Percentage of changes whose writer the source names",
    ["capture"],
)
_shown: Counter[tuple[str, str, str]] = Counter()
"""Counts that this process has added to the metrics, by capture, table and outcome."""


class CaptureMetrics:
    """Updates the metrics of one capture."""

    def __init__(self, capture: str) -> None:
        self._capture = capture

    def coverage(self, percent: float) -> None:
        """Set the percentage of changes for which the source gave provenance."""
        COVERAGE.labels(self._capture).set(percent)

    def balance(self, rows: Mapping[str, RowCounts]) -> None:
        """Set the counts of rows as the log has them, over all restarts."""
        name = self._capture
        for table, one in rows.items():
            counts = {"read": one.read, "added": one.added, PUBLISHED: one.published}
            for outcome, count in {**counts, SKIPPED: one.skipped, DEAD: one.dead}.items():
                more = count - _shown[name, table, outcome]
                if more > 0:
                    ROWS.labels(name, table, outcome).inc(more)
                    _shown[name, table, outcome] = count
            HELD_ROWS.labels(name, table).set(one.held)
            VANISHED_ROWS.labels(name, table).set(one.vanished)
            if one.vanished != _shown[name, table, "vanished"]:
                _shown[name, table, "vanished"] = one.vanished
                logger.error(
                    "capture %s: %d rows of %s were read and became nothing",
                    *(name, one.vanished, table),
                )
