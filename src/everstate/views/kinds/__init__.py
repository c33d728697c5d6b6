"""Kinds of views: each is one file with its columns, row deltas, batch and reading.

A kind defines the layout of its table (:class:`Layout`), the row delta of one image of a change
(`columns`), the batch result of the definition (`batch`), and what readers see (`read`). Its table
is merged in one of the ways of :data:`everstate.views.tables.Merge`. Its queries are texts in
PostgreSQL's dialect over the names of a store (:class:`~.kind.Names`).
"""

from everstate.views.kinds.history import HistoryPlan
from everstate.views.kinds.kind import ViewPlan
from everstate.views.kinds.latest import LatestPlan

__all__ = ["HistoryPlan", "LatestPlan", "ViewPlan"]
