"""Which rows of a view readers see: HAVING, ORDER BY, LIMIT and OFFSET.

They are applied when the view is read; all rows are stored, because a table with only n rows would
lack the row that moves up after a deletion.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from everstate.views.kinds.kind import By

_NAME: Final = re.compile(r"\w+|\"[^\"]+\"")
_CONSTANT: Final = re.compile(r"-?[0-9.]+|'(?:[^']|'')*'|null|true|false", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Shown:
    """PostgreSQL's texts of these clauses, over the columns of a reader's query."""

    having: str | None = None
    order: tuple[By, ...] = ()
    limit: int | None = None
    offset: int = 0

    @property
    def texts(self) -> list[str]:
        """Its texts for a fingerprint; empty without any of the clauses."""
        clauses = [self.having or "", *(_of_kept(by).sql for by in self.order)]
        clauses += [str(self.limit), str(self.offset)]
        return clauses if self != ALL else []

    def select(self, columns: str, kept: str, ties: Iterable[By], *, limited: bool) -> str:
        """A reader's query; ``kept``: a relation of that name; ``ties``: tie-breakers of the order.

        Without ``limited`` there is no LIMIT and no OFFSET.
        """
        parts = [f"SELECT {columns} FROM {kept}"]
        if self.having is not None:
            parts.append(f" WHERE {self.having}")
        if self.order:
            terms = [_of_kept(by).sql for by in (*self.order, *ties) if not _is_constant(by)]
            parts.append(f" ORDER BY {', '.join(terms)}" if terms else "")
        if limited and self.limit is not None:
            parts.append(f" LIMIT {self.limit}")
        if limited and self.offset:
            parts.append(f" OFFSET {self.offset}")
        return "".join(parts)


def _of_kept(by: By) -> By:
    """The same term; PostgreSQL takes a name alone for that of an output before a column's."""
    return replace(by, text=f"kept.{by.text}") if _NAME.fullmatch(by.text) else by


def _is_constant(by: By) -> bool:
    """Whether a term orders nothing; PostgreSQL takes the number 2 for the second output."""
    return _CONSTANT.fullmatch(by.text) is not None


ALL: Final = Shown()
"""All rows, without an order."""
