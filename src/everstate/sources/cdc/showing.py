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


def show_balance(capture: str, rows: Mapping[str, RowCounts]) -> None:
    """Set the counts of a capture's rows as the log has them, over all restarts."""
    for table, one in rows.items():
        counts = {"read": one.read, "added": one.added, PUBLISHED: one.published}
        for outcome, count in {**counts, SKIPPED: one.skipped, DEAD: one.dead}.items():
            more = count - _shown[capture, table, outcome]
            if more > 0:
                ROWS.labels(capture, table, outcome).inc(more)
                _shown[capture, table, outcome] = count
        HELD_ROWS.labels(capture, table).set(one.held)
        VANISHED_ROWS.labels(capture, table).set(one.vanished)
        if one.vanished != _shown[capture, table, "vanished"]:
            _shown[capture, table, "vanished"] = one.vanished
            logger.error(
                "capture %s: %d rows of %s were read and became nothing",
                *(capture, one.vanished, table),
            )
