"""Unknown fields in input from people, clients and files: one rule for all of them.

A name that is no field of the model is usually a typing error, and dropping its value would lose
data silently. It is refused, unless one of the entity type's models sets pydantic's `extra` itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from pydantic import BaseModel

from everstate.changes.annotations import meant

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


EXTRA: Final = "extra_forbidden"
"""Type of pydantic's error for such a field."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """How an entity type treats fields that its models do not have."""

    rule: Literal["forbid"] | None
    computed: frozenset[str]
    """Names of computed fields, which readers see and may send back."""

    def is_computed(self, error: ErrorDetails) -> bool:
        """Whether an error only reports that the input has a computed field."""
        return error["type"] == EXTRA and error["loc"][-1] in self.computed


@lru_cache(maxsize=1024)
def takes_unknown(model: type[BaseModel]) -> Unknown:
    """Whether unknown fields are refused: they are, unless one of the models sets `extra` itself.

    `model_config = ConfigDict(extra="ignore")` drops them, as pydantic does by itself.
    """
    models = models_of(model)
    own = any(each.model_config.get("extra") is not None for each in models)
    computed = {
        written
        for each in models
        for name, info in each.model_computed_fields.items()
        for written in (name, info.alias or name)
    }
    return Unknown(None if own else "forbid", frozenset(computed))


def models_of(model: type[BaseModel]) -> set[type[BaseModel]]:
    """A model, and those that its values may hold at any depth."""
    return _models_of(model, set())


def _models_of(annotation: Any, seen: set[type[BaseModel]]) -> set[type[BaseModel]]:
    annotation = meant(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation not in seen:
            seen.add(annotation)
            for info in annotation.model_fields.values():
                _models_of(info.annotation, seen)
    for part in get_args(annotation):
        _models_of(part, seen)
    return seen


def message_of(error: ErrorDetails) -> str:
    """Why a field is refused."""
    return "there is no field of this name" if error["type"] == EXTRA else error["msg"]


def reason_of(field_names: Sequence[str], error: ErrorDetails) -> str:
    """Why a field is refused, with the most similar field name as a hint."""
    message = message_of(error)
    if error["type"] != EXTRA:
        return message
    meant = difflib.get_close_matches(str(error["loc"][-1]), field_names, 1)
    hint = f"; did you mean {meant[0]}?" if meant and len(error["loc"]) == 1 else ""
    return f"{message}{hint}"
