"""What the routes say of themselves in OpenAPI 3.1: schemas, parameters, answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pydantic.json_schema import models_json_schema

from everstate.changes import EntityType
from everstate.changes.unknown import takes_unknown
from everstate.sources.crud import provenance as names
from everstate.sources.crud.answers import JSON
from everstate.sources.crud.filters import Filters
from everstate.sources.crud.patches import JSON_PATCH, MERGE_PATCH, OPERATIONS_MAX

PROBLEM: Final = "application/problem+json"
Schema = dict[str, Any]

_REF: Final = "#/components/schemas/{model}"
_TEXT: Final = {"type": "string", "minLength": 1, "pattern": "^[!-~]([ -~]*[!-~])?$"}
_TAGS: Final = r'^(W/)?"[!#-~]*"(, ?(W/)?"[!#-~]*")*$'
_POINTER: Final = {"type": "string", "pattern": "^(/[^/~]*(~[01][^/~]*)*)*$"}
_WITH_VALUE: Final = ("add", "replace", "test")
_WITH_FROM: Final = ("move", "copy")

_WHAT: Final = {
    200: "What was asked for.",
    201: "The entity was made.",
    204: "The entity was deleted.",
    304: "The reader has this version.",
    400: "The request cannot be read.",
    401: "The token is none that is known here.",
    404: "There is no such entity.",
    409: "It exists already.",
    412: "If-Match or If-None-Match does not hold; `version` is the present version.",
    413: "The change is too large for the log.",
    415: "The body is of another type.",
    422: "The body is no entity, provenance is missing, or the Idempotency-Key was used before.",
    503: "A server does not answer now; send the request again.",
}


class Schemas:
    """JSON schemas of entity types as they are written and read, and of problems."""

    def __init__(self, entity_types: Sequence[EntityType]) -> None:
        models: list[Any] = [
            (each.model, mode) for each in entity_types for mode in ("validation", "serialization")
        ]
        self._refs, defined = models_json_schema(models, ref_template=_REF)
        found: dict[str, Schema] = defined.get("$defs", {})
        for each in entity_types:
            if takes_unknown(each.model).rule == "forbid":
                _close(found, self._refs[each.model, "validation"])
        self.components: dict[str, Schema] = {
            **found,
            "Problem": _PROBLEM_SCHEMA,
            "MergePatch": {"type": "object", "description": "JSON Merge Patch, RFC 7396"},
            "JsonPatch": _json_patch_schema(),
        }

    def written(self, entity_type: EntityType) -> Schema:
        """Schema of a body that is an entity."""
        return self._refs[entity_type.model, "validation"]

    def read(self, entity_type: EntityType) -> Schema:
        """Schema of an entity's state in an answer."""
        return self._refs[entity_type.model, "serialization"]

    def page(self, entity_type: EntityType) -> Schema:
        """Schema of a page of entities."""
        item = {
            "type": "object",
            "required": ["key", "version", "state"],
            "properties": {
                "key": {"type": "string"},
                "version": {"type": "integer", "minimum": 1},
                "state": self.read(entity_type),
            },
        }
        return {
            "type": "object",
            "required": ["items", "next"],
            "properties": {
                "items": {"type": "array", "items": item},
                "next": {"type": ["string", "null"], "description": "cursor of the next page"},
            },
        }


def _close(components: dict[str, Schema], schema: Any) -> None:
    """Say of each object that a body may hold that it takes no other fields."""
    if isinstance(schema, list):
        for part in schema:
            _close(components, part)
    if not isinstance(schema, dict):
        return
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    if name in components and "additionalProperties" not in components[name]:
        if "properties" in components[name]:
            components[name]["additionalProperties"] = False
            _close(components, components[name])
    for part in schema.values():
        _close(components, part)


_PROBLEM_SCHEMA: Final[Schema] = {
    "type": "object",
    "description": "RFC 9457",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "advice": {"type": "string"},
        "version": {"type": "integer", "description": "present version; 0: there is none"},
        "problems": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"field": {"type": "string"}, "reason": {"type": "string"}},
            },
        },
    },
}


def body_of(*types: tuple[str, Schema]) -> Schema:
    """A required request body by content type."""
    return {"required": True, "content": {kind: {"schema": schema} for kind, schema in types}}


def entity_body(schemas: Schemas, entity_type: EntityType) -> Schema:
    """Body that is a whole entity."""
    return body_of((JSON, schemas.written(entity_type)))


def patch_body() -> Schema:
    """Body that is a patch of either kind."""
    return body_of(
        (MERGE_PATCH, {"$ref": _REF.format(model="MergePatch")}),
        (JSON_PATCH, {"$ref": _REF.format(model="JsonPatch")}),
    )


def conditions() -> list[Schema]:
    """If-Match and If-None-Match."""
    tags = {"type": "string", "anyOf": [{"const": "*"}, {"pattern": _TAGS}]}
    return [
        _header("If-Match", tags, 'Only if the version is one of these: `"3"`, or `*` for any.'),
        _header("If-None-Match", tags, "Only if it is none of these; `*`: there is none."),
    ]


def write_headers(*, local: bool) -> list[Schema]:
    """Idempotency-Key and the provenance."""
    key = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!#-~]+$"}
    what = "Write once; a repeated request is answered as before."
    return [_header("Idempotency-Key", key, what), *provenance_headers(local=local)]


def provenance_headers(*, local: bool) -> list[Schema]:
    """Who writes, why and when; in local mode the caller names itself."""
    text, moment = {**_TEXT, "maxLength": 500}, {"type": "string", "format": "date-time"}
    found = [
        _header(names.ACTOR, text, "Who asked the caller for it."),
        _header(names.REASON, text, "Why."),
        _header(names.CORRELATION, text, "What it belongs to."),
        _header(names.CAUSATION, text, "What caused it."),
        _header(names.OCCURRED_AT, moment, "When it happened in the world; default: now."),
    ]
    if local:
        found += [
            _header(names.SERVICE, text, "The service that writes.", required=True),
            _header(names.IDENTIFIER, text, "Who or what of the service.", required=True),
        ]
    return found


def list_parameters(filters: Filters, page_max: int) -> list[Schema]:
    """Limit, cursor, and each attribute that may be filtered."""
    limit = {"type": "integer", "minimum": 1, "maximum": page_max}
    found = [
        _query("limit", limit, "Most entities of the page."),
        _query("cursor", {"type": "string", "minLength": 1}, "`next` of an earlier page."),
    ]
    return found + [
        _query(name, filters.schema(name), "Only entities of which this is equal.")
        for name in filters.names
    ]


def answers(*statuses: int, schema: Schema | None = None, secured: bool) -> dict[int | str, Schema]:
    """Answers of a route: its own schema when it succeeds, a problem when it does not."""
    listed = {*statuses, 503, *((401,) if secured else ())}
    return {status: _answer(status, schema) for status in sorted(listed)}


def _answer(status: int, schema: Schema | None) -> Schema:
    found: Schema = {"description": _WHAT[status]}
    if status >= 400:
        problem = {"$ref": _REF.format(model="Problem")}
        found["content"] = {PROBLEM: {"schema": problem}}
    elif status in (200, 201) and schema is not None:
        found["content"] = {JSON: {"schema": schema}}
    return found


def with_headers(
    responses: dict[int | str, Schema], *names_of: str, statuses: tuple[int, ...]
) -> dict[int | str, Schema]:
    """The same answers, with these headers on some."""
    headers = {name: {"schema": {"type": "string"}, "required": True} for name in names_of}
    return {
        status: {**answer, "headers": {**answer.get("headers", {}), **headers}}
        if status in statuses
        else answer
        for status, answer in responses.items()
    }


def _header(name: str, schema: Schema, what: str, *, required: bool = False) -> Schema:
    return {
        "name": name,
        "in": "header",
        "required": required,
        "schema": schema,
        "description": what,
    }


def _query(name: str, schema: Schema, what: str) -> Schema:
    return {"name": name, "in": "query", "schema": schema, "description": what}


def _json_patch_schema() -> Schema:
    def operations(ops: tuple[str, ...], **more: Schema) -> Schema:
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
