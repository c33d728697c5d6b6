"""Searches a view by words: matching rows, best first, with the words in their context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from everstate.postgres import identifier, literal
from everstate.views.kinds.search import WORDS, SearchPlan

_HEADLINE: Final = "StartSel=**, StopSel=**, MaxFragments=2, MinWords=5, MaxWords=15"
_TOGETHER: Final = " … "


def search_query(schema: str, plan: SearchPlan, conditions: Sequence[str]) -> bytes:
    """The statement of a search; its parameters: words, those of the conditions, and the limit."""
    language, has = f"{literal(plan.language)}::regconfig", identifier(WORDS)
    names = ", ".join(map(identifier, plan.defined))
    texts = [c.output for c in plan.row if c.name in plan.searched and c.output is not None]
    searched = ", ".join(map(identifier, texts))
    return (
        f"WITH asked AS (SELECT websearch_to_tsquery({language}, %s) AS _asked), "
        f"best AS (SELECT {names}, _key, _version, ts_rank_cd({has}, asked._asked) AS _rank "
        f"FROM {identifier(schema, plan.name)}, asked "
        f"WHERE {' AND '.join([f'{has} @@ asked._asked', *conditions])} "
        "ORDER BY _rank DESC, _key LIMIT %s) "
        f"SELECT best.*, ts_headline({language}, concat_ws('{_TOGETHER}', {searched}), "
        f"asked._asked, '{_HEADLINE}') FROM best, asked ORDER BY _rank DESC, _key"
    ).encode()
