"""Message shapes: parse the messages of each capture tool into neutral source rows. No I/O."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from everstate.sources.cdc.rows import RawMessage, SourceRow
from everstate.sources.cdc.shapes import debezium, flat

READERS: Final[Mapping[str, Callable[[RawMessage], list[SourceRow]]]] = {
    "debezium": debezium.read_rows,
    "maxwell": partial(flat.read, flat.maxwell),
    "canal": partial(flat.read, flat.canal),
    "goldengate": partial(flat.read, flat.goldengate),
    "dms": partial(flat.read, flat.dms),
}
"""Form → reader of one record of a raw topic."""
