"""Parses request bodies into entities: strictly by the model, reporting every problem. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from everstate.changes import EntityType
from everstate.changes.unknown import reason_of, takes_unknown
from everstate.errors import InvalidBody, InvalidRequest

_PROBLEMS_MAX: Final = 20
_decode = msgspec.json.Decoder().decode


def read_entity(entity_type: EntityType, body: bytes) -> BaseModel:
    """The entity in a JSON body; values must have the right JSON type, and are never converted.

    A field that the model does not have is refused as a likely mistake; see
    :mod:`everstate.changes.unknown`. Raises InvalidRequest for invalid JSON, and InvalidBody naming
    each field.
    """
    model = entity_type.model
    unknown = takes_unknown(model)
    try:
        return model.model_validate_json(body, strict=True, extra=unknown.rule)
    except ValidationError as cause:
        errors = cause.errors(include_url=False, include_context=False, include_input=False)
        if errors[0]["type"] == "json_invalid":
            raise InvalidRequest(f"the body is not JSON: {errors[0]['msg']}.") from cause
        wrong = [error for error in errors if not unknown.is_computed(error)]
        if not wrong:
            # Clients may send back what they read, including fields that the model computes.
            return model.model_validate_json(body, strict=True)
        raise InvalidBody(entity_type.name, _problems(entity_type, wrong)) from cause


def read_json(body: bytes) -> Any:
    """Any JSON value; raises InvalidRequest."""
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise InvalidRequest(f"the body is not JSON: {cause}.") from cause


def check_key(entity_type: EntityType, key: str, model: BaseModel) -> None:
    """Raise InvalidBody when the body's key is not the one in the path."""
    found = entity_type.key_of(model)
    if found != key:
        reason = f"is {found!r}, and the path says {key!r}"
        raise InvalidBody(entity_type.name, ((entity_type.key, reason),))


def _problems(
    entity_type: EntityType, errors: Sequence[ErrorDetails]
) -> tuple[tuple[str, str], ...]:
    return tuple(
        (".".join(str(part) for part in error["loc"]) or "body", reason_of(entity_type, error))
        for error in errors[:_PROBLEMS_MAX]
    )
