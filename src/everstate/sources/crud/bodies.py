"""Bodies read as entities: strict, by the model, every problem named. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from everstate.changes import EntityType
from everstate.errors import InvalidBody, InvalidRequest

_PROBLEMS_MAX: Final = 20
_decode = msgspec.json.Decoder().decode


def read_entity(entity_type: EntityType, body: bytes) -> BaseModel:
    """The entity that a JSON body is; values are taken as they are typed, never converted.

    Raises InvalidRequest for what is no JSON, and InvalidBody naming each field.
    """
    try:
        return entity_type.model.model_validate_json(body, strict=True)
    except ValidationError as cause:
        errors = cause.errors(include_url=False, include_context=False, include_input=False)
        if errors[0]["type"] == "json_invalid":
            raise InvalidRequest(f"the body is no JSON: {errors[0]['msg']}.") from cause
        raise InvalidBody(entity_type.name, _problems(errors)) from cause


def read_json(body: bytes) -> Any:
    """Any JSON value; raises InvalidRequest."""
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise InvalidRequest(f"the body is no JSON: {cause}.") from cause


def check_key(entity_type: EntityType, key: str, model: BaseModel) -> None:
    """Raise InvalidBody when the body is another entity than the path's."""
    found = entity_type.key_of(model)
    if found != key:
        reason = f"is {found!r}, and the path says {key!r}"
        raise InvalidBody(entity_type.name, ((entity_type.key, reason),))


def _problems(errors: list[ErrorDetails]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (".".join(str(part) for part in error["loc"]) or "body", error["msg"])
        for error in errors[:_PROBLEMS_MAX]
    )
