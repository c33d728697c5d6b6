"""Refuses options that have no meaning for a definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sqlglot import exp

from everstate.views.functions import SUPPORTED_AGGREGATES
from everstate.views.grammar import Grammar

_Holds = Callable[[Grammar], bool]


def _has_groups(grammar: Grammar) -> bool:
    select = grammar.select
    grouped = select.args.get("group") is not None
    return grouped or any(each.find(*SUPPORTED_AGGREGATES) for each in select.expressions)


def _is_of_rows(grammar: Grammar) -> bool:
    return not _has_groups(grammar)


def _is_of_live_rows(grammar: Grammar) -> bool:
    is_qualified = isinstance(grammar.select.args.get("qualify"), exp.Qualify)
    is_of_live = not (grammar.of_changes or grammar.of_history)
    return _is_of_rows(grammar) and is_of_live and not is_qualified


_WANTED: Final[dict[str, tuple[_Holds, str]]] = {
    "scale": (_has_groups, "sums, such as SELECT a, sum(x) … GROUP BY a"),
    "indexes": (_is_of_rows, "rows; a view of groups has an index of its groups already"),
    "search": (_is_of_live_rows, "rows, such as SELECT … FROM <entity>"),
    "ttl": (_is_of_live_rows, "rows, such as SELECT … FROM <entity>"),
    "language": (
        lambda grammar: bool(grammar.declared.search),
        "words, which are declared with search=(…)",
    ),
}
"""For each option: the test that a definition must pass, and its wording in a refusal."""


def check_options(grammar: Grammar) -> None:
    """Raise InvalidView for an option that has no meaning for this definition."""
    for name, (holds, wanted) in _WANTED.items():
        if getattr(grammar.declared, name) not in (None, ()) and not holds(grammar):
            grammar.refuse(f"the option {name} is only for views of {wanted}", "Leave it out.")
    if grammar.declared.ttl is not None and grammar.declared.search:
        grammar.refuse(
            "a view cannot have both ttl and search",
            "Declare one view with ttl and one with search.",
        )
