"""Searchable views: rows, and a full text index of some of their texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import pyarrow as pa

from everstate.errors import ContradictoryQuery, InvalidView
from everstate.views.grammar import Grammar, suggestion
from everstate.views.kinds.images import fingerprint
from everstate.views.kinds.kind import Explained, Index, Layout, TableColumn, ViewPlan, quoted
from everstate.views.kinds.row import RowPlan, named_column, refuse_outputs

WORDS: Final = "_words"
"""Column by which readers search, with PostgreSQL's operator `@@`."""
LANGUAGES: Final = (
    *("simple", "arabic", "armenian", "basque", "catalan", "danish", "dutch", "english", "finnish"),
    *("french", "german", "greek", "hindi", "hungarian", "indonesian", "irish", "italian"),
    *("lithuanian", "nepali", "norwegian", "portuguese", "romanian", "russian", "serbian"),
    *("spanish", "swedish", "tamil", "turkish", "yiddish"),
)
"""Languages that PostgreSQL can stem; `simple` does not stem words."""


@dataclass(frozen=True)
class SearchPlan(RowPlan):
    """A view of rows with searchable texts."""

    searched: tuple[str, ...] = ()
    """Searchable columns; words of the first ones weigh more."""
    language: str = LANGUAGES[0]
    kind: ClassVar[str] = "search"
    outputs_stored = ViewPlan.outputs_stored

    def layout(self, types: Mapping[str, pa.DataType]) -> Layout:
        """The columns of a view of rows, and the words of the searched ones."""
        found = super().layout(types)
        for name in self.searched:
            if name in types and not pa.types.is_string(types[name]):
                shown = next(column.output for column in self.row if column.name == name)
                raise InvalidView(
                    self.name,
                    f"the column {shown} in search is {types[name]}, not text.",
                    advice="Make it a text: CAST(x AS STRING), or concat_ws(' ', list).",
                )
        words = TableColumn(WORDS, words=self.searched, language=self.language)
        return Layout((*found.columns, words), found.key, found.indexes)

    @property
    def explained(self) -> Explained:
        """What is stored for it, and what that costs."""
        base, texts = super().explained, ", ".join(map(self._output, self.searched))
        return Explained(
            f"{base.kept}; an index of the words of {texts} ({self.language})",
            f"{base.change}; where a text changes, the entries of its words",
            f"the rows that have the words, by index; {base.read}",
        )

    def indexes(self) -> tuple[Index, ...]:
        """The indexes of a view of rows, and the index of words."""
        return (*super().indexes(), Index("words", (WORDS,), of_words=True))

    def read_columns(self) -> list[str]:
        """The columns that readers see, and the words."""
        return [*super().read_columns(), quoted(WORDS)]


def searchable(plan: ViewPlan) -> SearchPlan:
    """The plan, if the view can be searched; raises ContradictoryQuery."""
    if not isinstance(plan, SearchPlan):
        raise ContradictoryQuery(
            f"{plan.name} cannot be searched.",
            advice='Declare it with search=("column", …), and restart `everstate run`.',
        )
    return plan


def search_plan(grammar: Grammar, base: RowPlan) -> SearchPlan:
    """The plan of a searchable view, from that of a view of rows; raises InvalidView."""
    declared = grammar.declared
    language = declared.language or LANGUAGES[0]
    if language not in LANGUAGES:
        grammar.refuse(
            f"PostgreSQL has no text search language {language!r}",
            suggestion(language, dict.fromkeys(LANGUAGES))
            or f"Choose one of {', '.join(LANGUAGES)}.",
        )
    refuse_outputs(grammar, base, (WORDS,))
    searched = tuple(named_column(grammar, base.row, name, "search") for name in declared.search)
    texts = ["search", base.fingerprint, language, *searched]
    given = base.given(fingerprint(grammar.entity_type, texts))
    return SearchPlan(**given, searched=searched, language=language)
