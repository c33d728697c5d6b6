"""Parses request bodies into entities: strictly by the model, reporting every problem. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from pydantic import BaseModel

from everstate.changes import EntityType
from everstate.changes.accepting import NotAccepted, accept
from everstate.changes.json_numbers import decode
from everstate.changes.keys import KEY_BYTES_MAX
from everstate.errors import InvalidBody, InvalidRequest

_PROBLEMS_MAX: Final = 20


def read_entity(entity_type: EntityType, body: bytes) -> BaseModel:
    """The entity in a JSON body; values must have the right JSON type, and are never converted.

    See :mod:`everstate.changes.accepting`. Raises InvalidRequest for invalid JSON, and InvalidBody
    naming each field.
    """
    try:
        return accept(entity_type.model, body, strict=True)
    except NotAccepted as cause:
        first = cause.errors[0]
        if first["type"] == "json_invalid":
            raise InvalidRequest(f"the body is not JSON: {first['msg']}.") from cause
        raise InvalidBody(entity_type.name, cause.problems("body", _PROBLEMS_MAX)) from cause


def read_json(body: bytes) -> Any:
    """Any JSON value; raises InvalidRequest."""
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise InvalidRequest(f"the body is not JSON: {cause}.") from cause


def check_key(entity_type: EntityType, key: str, model: BaseModel) -> None:
    """Raise InvalidBody when the body's key is not the one in the path."""
    found = entity_type.key_of(model)
    if found != key:
        shown = found if len(found) <= KEY_BYTES_MAX else f"{found[:40]}…"
        reason = f"is {shown!r}, and the path says {key!r}"
        raise InvalidBody(entity_type.name, ((entity_type.key, reason),))
