"""Accepted changes of one partition, prepared for writing to tables."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import cached_property

import pyarrow as pa

from everstate.views.gate import Keys
from everstate.views.images import Images, cut


class Batch:
    """Changes that apply, with the values that tables need; versions of a key are in order."""

    def __init__(
        self, changes: pa.Table, floors: Mapping[str, datetime], keys: Keys | None = None
    ) -> None:
        """``floors``: stored as-of times, for the keys where a change may have an earlier time.

        ``keys``: the changes by key, when they are known.
        """
        self.changes = changes
        self.floors = floors
        self._keys = keys

    @cached_property
    def keys(self) -> Keys:
        """The changes by key."""
        return Keys(self.changes) if self._keys is None else self._keys

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
        """Row of the newest change of each key, in the order of the keys."""
        return pa.array(self.keys.lasts)

    def after(self, floors: Mapping[str, datetime]) -> Batch:
        """The same changes with these stored as-of times as floors."""
        if not floors:
            return self
        found = Batch(self.changes, floors, self.keys)
        found.__dict__["images"] = self.images
        return found

    def first(self, count: int) -> Batch:
        """Only the first ``count`` changes."""
        return Batch(self.changes.slice(0, count), self.floors)

    def newest(self, values: pa.ChunkedArray | pa.Array) -> pa.Array:
        """The values of a column of the changes in each key's newest change, by key."""
        chosen = values.take(self.lasts)
        return chosen.combine_chunks() if isinstance(chosen, pa.ChunkedArray) else chosen
