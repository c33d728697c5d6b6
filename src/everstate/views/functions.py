"""The functions that an expression may use: those that always give the same for the same image.

Also the refused functions, with the reason and what to write instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from sqlglot import exp


def _classes(*names: str) -> tuple[type[exp.Expr], ...]:
    """Functions by the names of sqlglot's classes; a version of sqlglot may lack some."""
    return tuple(getattr(exp, name) for name in names if hasattr(exp, name))


CLOCK: Final = _classes(
    "CurrentDate",
    "CurrentTime",
    "CurrentTimestamp",
    "CurrentTimestampLTZ",
    "CurrentDatetime",
    "Localtime",
    "Localtimestamp",
    "Systimestamp",
    "UtcDate",
    "UtcTime",
    "UtcTimestamp",
)
RANDOM: Final = _classes(
    *("Rand", "Randn", "Randstr", "Uniform", "Normal", "Zipf", "Shuffle", "Uuid", "Generator"),
    *("GenerateBool", "GenerateDouble", "GenerateInt", "GenerateText"),
    *("Seq1", "Seq2", "Seq4", "Seq8", "NextValueFor", "Encrypt", "EncryptRaw", "Predict"),
    *(name for name in vars(exp) if name.startswith(("AI", "ML"))),
)
SESSION: Final = _classes(
    "SessionUser",
    # Current…: user, role, schema, session, version; current times are in `CLOCK` too.
    *(name for name in vars(exp) if name.startswith("Current")),
)
TIME_OF_READING: Final = re.compile(
    r"\s*(?:(?:now|today|tomorrow|yesterday)\b|T?\d{1,2}:\d)", re.IGNORECASE
)
"""Texts that Spark reads as a time relative to the day on which it reads them."""
CLOCK_NAMES: Final = frozenset({"now", "curdate", "current_time", "unix_timestamp"})

# Deterministic functions of Spark that sqlglot has no class for.
PLAIN_FUNCTIONS: Final = frozenset(
    """aggregate ascii bigint bin boolean bround btrim char char_length character_length cot csc
    date decimal degrees double e elt endswith equal_null expm1 factorial find_in_set float
    forall format_number get hash hypot ilike int isnotnull isnull len luhn_check make_date mask
    named_struct negative nvl2 octet_length overlay percentage pmod positive printf radians
    rint sec shiftleft shiftright shiftrightunsigned signum sinh smallint soundex space
    startswith string substring_index timestamp timestamp_micros timestamp_millis
    timestamp_seconds tinyint to_char to_number translate try_mod try_to_number unix_date
    unix_micros unix_millis unix_seconds url_decode url_encode weekday width_bucket xxhash64
    zeroifnull nullifzero""".split()
)

PARTS: Final = (
    *(exp.Column, exp.Dot, exp.Identifier, exp.Var, exp.Star, exp.Paren, exp.Bracket),
    *(exp.Literal, exp.Null, exp.Boolean, exp.HexString, exp.Interval, exp.IntervalSpan),
    *(exp.Add, exp.Sub, exp.Mul, exp.Div, exp.IntDiv, exp.Mod, exp.Neg, exp.DPipe),
    *(exp.BitwiseAnd, exp.BitwiseOr, exp.BitwiseXor, exp.BitwiseNot),
    *(exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.NullSafeEQ, exp.NullSafeNEQ),
    *(exp.And, exp.Or, exp.Not, exp.Is, exp.In, exp.Between, exp.Tuple),
    *(exp.Like, exp.ILike, exp.Escape, exp.Any, exp.All),
    *(exp.DataType, exp.DataTypeParam, exp.ColumnDef, exp.PropertyEQ, exp.Slice),
    *(exp.AtTimeZone, exp.FromTimeZone),
    *(exp.JSONPath, exp.JSONPathPart, exp.Distinct, exp.Filter, exp.Where),
)
"""Parts that an expression may have besides functions; any other part is refused."""

REWRITTEN: Final = (exp.UnixDate, exp.Space, exp.StrToUnix)
"""Functions that sqlglot writes as others of the same meaning."""
TEXTS: Final = (exp.Upper, exp.Lower, exp.Substring, exp.Concat, exp.DPipe, exp.Trim)

SUPPORTED_AGGREGATES: Final = (exp.Count, exp.Sum, exp.Avg, exp.CountIf, exp.Max, exp.Min)

OTHER_AGGREGATES: Final[Mapping[type[exp.Expr], str]] = {
    **dict.fromkeys(
        (exp.ArgMax, exp.ArgMin, exp.First, exp.Last, exp.FirstValue, exp.LastValue),
        "Keep the whole row: SELECT … QUALIFY row_number() OVER (PARTITION BY … ORDER BY …) = 1.",
    ),
    **dict.fromkeys(
        (exp.ArrayAgg, exp.ArrayUniqueAgg, exp.GroupConcat),
        "Declare a view of rows, and collect its values in the query that reads it.",
    ),
    **dict.fromkeys((exp.LogicalOr, exp.Any), "Write count_if(x) > 0."),
    exp.LogicalAnd: "Write count_if(NOT x) = 0.",
    **dict.fromkeys((exp.ApproxDistinct,), "Write count(DISTINCT x), which is exact."),
}

WINDOW_FUNCTION: Final = (
    "a window function is allowed only in QUALIFY, because one change may move many rows",
    "Write QUALIFY row_number() OVER (PARTITION BY … ORDER BY …) <= n for the first n of each "
    "category. Compute other window functions in the query that reads the view.",
)
"""Why a window function is refused, and what to write."""
ELSEWHERE: Final = {
    "some": ("some cannot be updated change by change", "Write count_if(x) > 0."),
    "every": ("every cannot be updated change by change", "Write count_if(NOT x) = 0."),
    "mean": ("mean must have exactly one argument", "Average one expression at a time."),
    "window": (
        "window(…) is not allowed in a join",
        "Write date_trunc('HOUR', ts) over a time of one side, and group by it.",
    ),
    "session_window": (
        "session_window is not allowed, because a row that comes late may merge two sessions",
        "Use window(ts, '1 hour'), or a view in Python.",
    ),
}
"""Functions that are refused here, though Spark has them: why, and what to write."""
