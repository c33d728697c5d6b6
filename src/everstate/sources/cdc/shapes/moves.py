"""Updates that change a row's key: a delete of the old key, and a new row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from everstate.sources.cdc.rows import SourceRow, value_in


def key_in(names: Sequence[str] | None, image: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Values of the key's columns in an image, where it has all of them."""
    if not names or image is None:
        return None
    found = {name: value_in(image, name) for name in names}
    return None if None in found.values() else found


def moved(row: SourceRow, names: Sequence[str]) -> list[SourceRow]:
    """The row itself; of an update that changed one of these columns, the two rows it stands for.

    Debezium itself does this for the key of its messages. Other tools do not, nor does it for key
    columns that only the declaration gives.
    """
    if row.op != "u" or row.before is None:
        return [row]
    names = names or tuple(row.key or ())
    was, key = key_in(names, row.before), key_in(names, row.after)
    if was is None or key is None or was == key:
        return [row]
    gone = replace(row, op="d", key=was, after=None, is_whole=False)
    come = replace(row, op="c", key=key, before=None, moved_from=was)
    return [gone, come]
