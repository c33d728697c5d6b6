"""OpenAPI 3.1 descriptions that only the CRUD routes need. Pure."""

from __future__ import annotations

from typing import Final

from everstate.http.openapi import REF, JsonSchema, body_of, query
from everstate.sources.crud.filters import Filters
from everstate.sources.crud.patches import JSON_PATCH, MERGE_PATCH, OPERATIONS_MAX

_POINTER: Final = {"type": "string", "pattern": "^(/[^/~]*(~[01][^/~]*)*)*$"}
_WITH_VALUE: Final = ("add", "replace", "test")
_WITH_FROM: Final = ("move", "copy")


def patch_schemas() -> dict[str, JsonSchema]:
    """Schemas of both kinds of patches, by name."""
    return {
        "MergePatch": {"type": "object", "description": "JSON Merge Patch, RFC 7396"},
        "JsonPatch": _json_patch_schema(),
    }


def patch_body() -> JsonSchema:
    """Body that is a patch of either kind."""
    return body_of(
        (MERGE_PATCH, {"$ref": REF.format(model="MergePatch")}),
        (JSON_PATCH, {"$ref": REF.format(model="JsonPatch")}),
    )


def list_parameters(filters: Filters, page_max: int) -> list[JsonSchema]:
    """Limit, cursor, and each attribute that can be a filter."""
    limit = {"type": "integer", "minimum": 1, "maximum": page_max}
    found = [
        query("limit", limit, "Largest number of entities on the page."),
        query("cursor", {"type": "string", "minLength": 1}, "`next` of the previous page."),
    ]
    return found + [
        query(name, filters.schema(name), "Only entities with this value.")
        for name in filters.names
    ]


def _json_patch_schema() -> JsonSchema:
    def operations(ops: tuple[str, ...], **more: JsonSchema) -> JsonSchema:
        properties = {"op": {"enum": list(ops)}, "path": _POINTER, **more}
        return {"type": "object", "required": ["op", "path", *more], "properties": properties}

    return {
        "type": "array",
        "description": "JSON Patch, RFC 6902",
        "maxItems": OPERATIONS_MAX,
        "items": {
            "oneOf": [
                operations(_WITH_VALUE, value={}),
                operations(_WITH_FROM, **{"from": _POINTER}),
                operations(("remove",)),
            ]
        },
    }
