"""Tests whether a view's SQL gives the same row for the same image at any time (C16).

It also tests whether products of decimals keep all their places. Spark's analysed plan decides
both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from py4j.java_gateway import is_instance_of

from everstate.pipeline.spark.internals import java

_EXPRESSIONS: Final = "org.apache.spark.sql.catalyst.expressions."
_PATTERNS: Final = "org.apache.spark.sql.catalyst.trees.TreePattern"
_TIMES: Final = ("timestamp", "timestamp_ntz")
_CLOCK_WORD: Final = re.compile(r"\s*(?:now|today|tomorrow|yesterday)\b", re.IGNORECASE)
_PLACES: Final = 38
"""Decimal places of the longest decimal of Spark."""
_TIME_ONLY: Final = re.compile(r"\s*T?\d{1,2}:")


def changing(analysed: Any) -> str | None:
    """Why the rows of an analysed Spark plan depend on more than its input; ``None``: they do not.

    Tests more than what Spark calls non-deterministic: a text that is cast to a date or a time may
    be a word like 'now', or a time of day, which Spark reads as one of today.
    """
    if not analysed.deterministic():
        return "its SQL has a part that Spark does not guarantee to give the same value each time."
    for cast in _found(analysed, "Cast", "CAST"):
        reason = _of_today(cast)
        if reason is not None:
            return reason
    return None


def rounding(analysed: Any) -> str | None:
    """Why Spark rounds a product of an analysed plan without a word; ``None``: it does not.

    Too many digits before the point are an error at the value; places beyond 38 are cut off.
    """
    for product in _found(analysed, "Multiply", "BINARY_ARITHMETIC"):
        sides = [side.dataType() for side in (product.left(), product.right())]
        if all(side.typeName().startswith("decimal") for side in sides):
            places = sum(side.scale() for side in sides)
            if places > _PLACES:
                return (
                    f"{_shown(product)} may have {places} decimal places, and Spark rounds it to "
                    f"{_PLACES}."
                )
    return None


def _of_today(cast: Any) -> str | None:
    target, source = cast.dataType().typeName(), cast.child()
    kind = source.dataType().typeName()
    if kind.startswith("time(") and target in _TIMES:
        return f"{_shown(cast)} would be a time of the day on which it is computed."
    if not kind.startswith("string"):
        return None
    if source.foldable():
        text = str(source.eval(None))
        word = target in (*_TIMES, "date") and _CLOCK_WORD.match(text)
        if word or (target in _TIMES and _TIME_ONLY.match(text)):
            return f"{text!r} as a {target} changes its value while no entity changes."
        cast.eval(None)  # a constant that cannot be cast is an error now, not at each change
        return None
    if target not in _TIMES:
        return None
    return (
        f"{_shown(cast)} reads a text like '10:00' as a time of the day on which it is computed; "
        "write to_timestamp(x, 'yyyy-MM-dd HH:mm:ss'), with the format of your texts."
    )


def _shown(expression: Any) -> str:
    return re.sub(r"\bcurrent\.|`", "", expression.sql())


def _found(plan: Any, kind: str, pattern: str) -> Iterator[Any]:
    """Every expression of one kind in a plan, and in the expressions that replace functions.

    ``pattern`` is the name under which Spark's trees say whether such an expression is in them, so
    that only the parts that have one are walked: each node costs some ten calls into the JVM.
    """
    gateway, packages = java()
    names = getattr(packages, _PATTERNS)
    patterns = (getattr(names, pattern)(), names.RUNTIME_REPLACEABLE())
    waiting = [plan]
    while waiting:
        node = waiting.pop()
        if not any(node.containsPattern(each) for each in patterns):
            continue
        waiting += _each(node.children())
        if is_instance_of(gateway, node, "org.apache.spark.sql.catalyst.plans.QueryPlan"):
            waiting += _each(node.expressions())
        elif is_instance_of(gateway, node, f"{_EXPRESSIONS}RuntimeReplaceable"):
            waiting.append(node.replacement())
        elif is_instance_of(gateway, node, f"{_EXPRESSIONS}{kind}"):
            yield node


def _each(nodes: Any) -> list[Any]:
    return [nodes.apply(place) for place in range(nodes.size())]
