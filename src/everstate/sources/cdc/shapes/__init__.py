"""Message shapes: parse the messages of each capture tool into neutral source rows. No I/O."""

from collections.abc import Callable, Mapping
from typing import Final

from everstate.sources.cdc.rows import RawMessage, SourceRow
from everstate.sources.cdc.shapes import debezium, flat

READERS: Final[Mapping[str, Callable[[RawMessage], list[SourceRow]]]] = {
    "debezium": debezium.read_rows,
    "maxwell": flat.read_maxwell,
    "canal": flat.read_canal,
    "goldengate": flat.read_goldengate,
    "dms": flat.read_dms,
}
"""Form → reader of one record of a raw topic."""
