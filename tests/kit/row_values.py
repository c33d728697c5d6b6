"""Values of every type that a column may have, which a store gives back exactly."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

MOMENT: Final = datetime(2026, 11, 29, 21, 0, 0, 123_456, tzinfo=UTC)
LAST: Final = datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
KINDS: Final[dict[str, tuple[pa.DataType, list[Any]]]] = {
    "text": (pa.string(), ["", "é\u2028日本", '"\\\n', "a\x00b", None]),
    "whole": (pa.int64(), [2**63 - 1, -(2**63), 2**53 + 1, None]),
    "double": (
        pa.float64(),
        [0.1, -0.0, 1e300, 1.7976931348623157e308, 5e-324, math.inf, -math.inf, None],
    ),
    "exact": (pa.decimal128(38, 2), [Decimal("9" * 36 + ".99"), Decimal("-0.01"), None]),
    "small": (pa.decimal128(38, 10), [Decimal("-0.0000000001"), Decimal("9" * 28), None]),
    "yes": (pa.bool_(), [True, False, None]),
    "day": (pa.date32(), [date(1, 1, 1), date(9999, 12, 31), None]),
    "zoned": (pa.timestamp("us", "UTC"), [MOMENT, datetime(1, 1, 1, tzinfo=UTC), LAST, None]),
    "local": (pa.timestamp("us"), [MOMENT.replace(tzinfo=None), None]),
    "list": (pa.list_(pa.decimal128(9, 2)), [[Decimal("1.10"), None], [], None]),
    "struct": (
        pa.struct([("a", pa.int64()), ("b", pa.list_(pa.date32()))]),
        [{"a": 2**60 + 1, "b": [date(2026, 1, 1)]}, {"a": None, "b": None}, None],
    ),
    "map": (pa.map_(pa.string(), pa.float64()), [[("", 1.5), ("a.b", None)], [], None]),
}
"""Name → type, and values that must come back exactly."""
