"""Accepted changes of one partition on their way into tables."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import cached_property

import pyarrow as pa

from everstate.views.gate import Keys
from everstate.views.images import Images, cut


class Batch:
    """Changes that apply, with what the tables need of them; versions of a key in order."""

    def __init__(self, changes: pa.Table, floors: Mapping[str, datetime]) -> None:
        """``floors``: the as-of times from before, for the keys where they may matter."""
        self.changes = changes
        self.floors = floors

    @cached_property
    def keys(self) -> Keys:
        """The changes by key."""
        return Keys(self.changes)

    @cached_property
    def as_of(self) -> pa.Array:
        """As-of time of each change."""
        return self.keys.running_as_of(self.floors)

    @cached_property
    def images(self) -> Images:
        """JSON texts of each change."""
        return cut(self.changes["raw_value"].to_pylist())

    @cached_property
    def lasts(self) -> pa.Array:
        """Row of the newest change of each key."""
        return pa.array(self.keys.lasts)

    def first(self, count: int) -> Batch:
        """The first ``count`` changes alone."""
        return Batch(self.changes.slice(0, count), self.floors)

    def newest(self) -> tuple[pa.Table, pa.Array]:
        """The newest change of each key, and its as-of time."""
        return self.changes.take(self.lasts), self.as_of.take(self.lasts)
