"""Reading SQL in Spark's dialect."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from sqlglot import Dialect, TokenType, exp, parse

DIALECT: Final = "spark"


def parsed(sql: str) -> list[exp.Expr | None]:
    """Statements of a text in Spark's dialect; raises SqlglotError.

    The parser reads `GROUP BY window(…)` as a WINDOW clause, so the word is quoted first. It does
    not know that `mean` is an aggregate, so it is read as `avg`.
    """
    spans = []
    tokens = Dialect.get_or_raise(DIALECT).tokenize(sql)
    for token, following in pairwise(tokens):
        called = following.token_type in (TokenType.L_PAREN, TokenType.DOT)
        if token.token_type is TokenType.WINDOW and called:
            spans.append((token.start, token.end + 1))
    for start, end in reversed(spans):
        sql = f"{sql[:start]}`{sql[start:end]}`{sql[end:]}"
    found = parse(sql, read=DIALECT)
    for statement in found:
        for call in [] if statement is None else list(statement.find_all(exp.Anonymous)):
            if spans:
                call.set("this", call.name)
            if call.name.lower() == "mean" and len(call.expressions) == 1:
                call.replace(exp.Avg(this=call.expressions[0]))
    return found


def reading(sql: str, table: str) -> str:
    """A canonical definition that reads another table in place of the one that it names."""
    (select,) = parsed(sql)
    assert select is not None
    for each in list(select.find_all(exp.Table)):
        name = exp.to_identifier(each.alias_or_name, quoted=True)
        each.replace(exp.alias_(exp.to_table(table, dialect=DIALECT), name, table=True))
    return select.sql(dialect=DIALECT, comments=False)
