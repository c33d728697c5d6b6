"""JSON Schemas (draft 7) of entity types and of their changes, for programs in any language."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from everstate.changes.entity import EntityType

DIALECT: Final = "http://json-schema.org/draft-07/schema#"
_REF: Final = "#/definitions/{model}"

SchemaObject = dict[str, Any]


def state_schema(entity_type: EntityType) -> SchemaObject:
    """Schema of an entity's state as messages have it.

    It takes states that other versions of the model wrote: unknown fields are allowed, and fields
    with a default may be missing.
    """
    (root,), definitions = model_schemas([entity_type.model])
    return {
        "$schema": DIALECT,
        "title": f"State of {entity_type.name}",
        "allOf": [root],
        "definitions": definitions,
    }


def change_schema(entity_type: EntityType) -> SchemaObject:
    """Schema of a message about an entity of this type: the envelope with typed states."""
    text = (files("everstate.changes") / "change.schema.json").read_text("utf-8")
    schema: SchemaObject = json.loads(text)
    (root,), definitions = model_schemas([entity_type.model])
    schema["title"] = f"Change of {entity_type.name}"
    schema["properties"]["entity"] = {"const": entity_type.name}
    own = schema["definitions"]
    # A model of the project may have the name of a part of the envelope.
    renamed = {name: f"{name}_" if name in own else name for name in definitions}
    own |= {renamed[name]: _renamed(each, renamed) for name, each in definitions.items()}
    own["State"] = _renamed(root, renamed)
    return schema


def model_schemas(
    models: Sequence[type[BaseModel]],
) -> tuple[list[SchemaObject], dict[str, SchemaObject]]:
    """A reference to the schema of each model, and the definitions that they need.

    Different models of one name have different definitions.
    """
    mode: JsonSchemaMode = "serialization"
    wanted = [(model, mode) for model in models]
    refs, found = models_json_schema(wanted, by_alias=True, ref_template=_REF)
    definitions = {name: _open(each) for name, each in found.get("$defs", {}).items()}
    return [dict(refs[model, mode]) for model in models], definitions


def _open(schema: Any) -> Any:
    """The same schema without prohibitions of unknown fields, which another version may have."""
    if isinstance(schema, Mapping):
        return {
            name: _open(value)
            for name, value in schema.items()
            if not (name == "additionalProperties" and value is False)
        }
    return [_open(each) for each in schema] if isinstance(schema, list) else schema


def _renamed(schema: Any, names: Mapping[str, str]) -> Any:
    """The same schema with other names of definitions in its references."""
    if isinstance(schema, Mapping):
        renamed = {name: _renamed(value, names) for name, value in schema.items()}
        target = schema.get("$ref")
        if isinstance(target, str):
            renamed["$ref"] = _REF.format(model=names[target.rpartition("/")[2]])
        return renamed
    return [_renamed(each, names) for each in schema] if isinstance(schema, list) else schema
