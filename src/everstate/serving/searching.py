"""Searches a view by words: matching rows, best first, with the words in their context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from psycopg import sql
from psycopg.sql import Composable, Composed

from everstate.errors import ContradictoryQuery
from everstate.views.kinds import ViewPlan
from everstate.views.kinds.search import WORDS, SearchPlan

_HEADLINE: Final = "StartSel=**, StopSel=**, MaxFragments=2, MinWords=5, MaxWords=15"
_TOGETHER: Final = " … "


def searchable(plan: ViewPlan) -> SearchPlan:
    """The plan, if the view can be searched; raises ContradictoryQuery."""
    if not isinstance(plan, SearchPlan):
        raise ContradictoryQuery(
            f"{plan.name} cannot be searched.",
            advice='Declare it with search=("column", …), and restart `everstate run`.',
        )
    return plan


def search_query(schema: str, plan: SearchPlan, conditions: Sequence[Composable]) -> Composed:
    """The statement of a search; its parameters: words, those of the conditions, and the limit."""
    language = sql.SQL("{}::regconfig").format(sql.Literal(plan.language))
    names = sql.SQL(", ").join(map(sql.Identifier, plan.defined))
    texts = [c.output for c in plan.row if c.name in plan.searched and c.output is not None]
    return sql.SQL(
        "WITH asked AS (SELECT websearch_to_tsquery({language}, %s) AS _asked), "
        "best AS (SELECT {names}, _key, _version, ts_rank_cd({has}, asked._asked) AS _rank "
        "FROM {view}, asked WHERE {has} @@ asked._asked{conditions} "
        "ORDER BY _rank DESC, _key LIMIT %s) "
        "SELECT best.*, ts_headline({language}, concat_ws({between}, {texts}), asked._asked, "
        "{options}) FROM best, asked ORDER BY _rank DESC, _key"
    ).format(
        language=language,
        names=names,
        has=sql.Identifier(WORDS),
        view=sql.Identifier(schema, plan.name),
        conditions=sql.SQL("").join(sql.SQL(" AND {}").format(each) for each in conditions),
        between=sql.Literal(_TOGETHER),
        texts=sql.SQL(", ").join(map(sql.Identifier, texts)),
        options=sql.Literal(_HEADLINE),
    )
