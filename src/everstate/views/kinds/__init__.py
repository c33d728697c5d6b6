"""Kinds of views: each is one file with its columns, row deltas, batch and reading.

A kind defines the layout of its table (:class:`Layout`), the row delta of one image of a change
(`columns`), the batch result of the definition (`batch_sql`), and what readers see (`reader`). Its
table is merged in one of three ways: `row`, `sum`, `append` (:mod:`everstate.views.tables`). The
queries of a kind are PostgreSQL's SQL, and PostgreSQL is the only store of views.
"""

from everstate.views.kinds.history import HistoryPlan
from everstate.views.kinds.kind import (
    EXACT,
    BatchSource,
    By,
    Explained,
    Index,
    Layout,
    TableColumn,
    ViewPlan,
    group_hash,
)
from everstate.views.kinds.latest import LatestPlan

__all__ = [
    "EXACT",
    "BatchSource",
    "By",
    "Explained",
    "HistoryPlan",
    "Index",
    "LatestPlan",
    "Layout",
    "TableColumn",
    "ViewPlan",
    "group_hash",
]
