"""OpenAPI 3.1 descriptions of the routes: schemas, parameters, answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic.json_schema import models_json_schema

from everstate.changes import EntityType, Kind
from everstate.changes.unknown import refuses_unknown
from everstate.http import callers as names
from everstate.http.answers import JSON

PROBLEM: Final = "application/problem+json"
JsonSchema = dict[str, Any]

REF: Final = "#/components/schemas/{model}"
_TEXT: Final = {"type": "string", "minLength": 1, "pattern": "^[!-~]([ -~]*[!-~])?$"}
OBJECT: Final[JsonSchema] = {"type": "object"}
STRING: Final[JsonSchema] = {"type": "string"}
TIME: Final[JsonSchema] = {"type": "string", "format": "date-time"}
VERSION: Final = {"type": "integer", "minimum": 1, "maximum": 2**63 - 1}
_TAGS: Final = r'^(W/)?"[!#-~]*"(, ?(W/)?"[!#-~]*")*$'

_WHAT: Final = {
    200: "The requested entity or data.",
    201: "The entity was created.",
    204: "The entity was deleted.",
    304: "The reader has this version, or the same answer.",
    400: "The request is invalid.",
    401: "The request has no valid token.",
    403: "The caller lacks a permission; `detail` names it.",
    404: "The entity does not exist.",
    409: "The entity exists already.",
    410: "The entity is deleted, at `version`; or the changes of the page are not stored any more.",
    412: "If-Match or If-None-Match does not hold; `version` is the current version.",
    413: "The change is too large for the log.",
    415: "The Content-Type of the body is not accepted.",
    422: "The body is not a valid entity, provenance is missing, the Idempotency-Key was used "
    "before, or the consistency token is not of this project.",
    429: "The caller sends too many requests; send it again after `Retry-After` seconds.",
    503: "A server does not answer now; send the request again.",
    504: "The views did not reach the token in time; send the request again.",
}


class Schemas:
    """JSON schemas of entity types, for writing and reading, and of problems."""

    def __init__(
        self, entity_types: Sequence[EntityType], own: Mapping[str, JsonSchema] | None = None
    ) -> None:
        """``own``: schemas of bodies of routers other than entities, by name."""
        models: list[Any] = [
            (each.model, mode) for each in entity_types for mode in ("validation", "serialization")
        ]
        self._refs, defined = models_json_schema(models, ref_template=REF)
        found: dict[str, JsonSchema] = defined.get("$defs", {})
        for each in entity_types:
            if refuses_unknown(each.model):
                _close(found, self._refs[each.model, "validation"])
        self.components: dict[str, JsonSchema] = {
            **found,
            "Problem": _PROBLEM_SCHEMA,
            **(own or {}),
        }

    def written(self, entity_type: EntityType) -> JsonSchema:
        """Schema of a body that is an entity."""
        return self._refs[entity_type.model, "validation"]

    def read(self, entity_type: EntityType) -> JsonSchema:
        """Schema of an entity's state in an answer."""
        return self._refs[entity_type.model, "serialization"]

    def page(self, entity_type: EntityType) -> JsonSchema:
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


def _close(components: dict[str, JsonSchema], schema: Any) -> None:
    """Set `additionalProperties: false` on each object that a body may hold."""
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


_PROBLEM_SCHEMA: Final[JsonSchema] = {
    "type": "object",
    "description": "RFC 9457",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "advice": {"type": "string"},
        "version": {
            "type": "integer",
            "description": "current version; 0: the entity does not exist",
        },
        "problems": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"field": {"type": "string"}, "reason": {"type": "string"}},
            },
        },
    },
}


def body_of(*types: tuple[str, JsonSchema]) -> JsonSchema:
    """A required request body by content type."""
    return {"required": True, "content": {kind: {"schema": schema} for kind, schema in types}}


def entity_body(schemas: Schemas, entity_type: EntityType) -> JsonSchema:
    """Body that is a whole entity."""
    return body_of((JSON, schemas.written(entity_type)))


def conditions() -> list[JsonSchema]:
    """If-Match and If-None-Match."""
    tags = {"type": "string", "anyOf": [{"const": "*"}, {"pattern": _TAGS}]}
    return [
        header(
            "If-Match", tags, 'Only if the current version is one of these: `"3"`, or `*` for any.'
        ),
        header(
            "If-None-Match", tags, "Only if the current version is none of these; `*`: no entity."
        ),
    ]


def past() -> list[JsonSchema]:
    """One of the parameters by which a state of the past is asked for."""
    return [
        query("at", TIME, "The state that was valid at this time in the world."),
        query("recorded_at", TIME, "The newest state that was recorded by this time."),
        query("version", VERSION, "The state of this version."),
    ]


def limit(most: int) -> JsonSchema:
    """The size of a page."""
    return query("limit", {"type": "integer", "minimum": 1, "maximum": most}, "Most items.")


def written_by() -> list[JsonSchema]:
    """The parameters by which changes are chosen: who wrote them, and when."""
    return [
        text("service", "By this service."),
        text("identifier", "With this identifier."),
        text("actor", "By this actor."),
        text("correlation", "With this correlation id."),
        query("kind", {"enum": [*Kind]}, "Only changes of this kind."),
        query("since", TIME, "Recorded at this time or later."),
        query("until", TIME, "Recorded before this time."),
    ]


def wait_for() -> JsonSchema:
    """Everstate-Wait-For."""
    token = {"type": "string", "pattern": "^[A-Za-z0-9._-]+$", "maxLength": 4096}
    return header(names.WAIT_FOR, token, "Wait until the views have reached this token.")


def write_headers(*, local: bool) -> list[JsonSchema]:
    """Idempotency-Key and the provenance."""
    key = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!#-~]+$"}
    what = "The request is carried out once; a repeated one gets the same answer."
    return [header("Idempotency-Key", key, what), *provenance_headers(local=local)]


def provenance_headers(*, local: bool) -> list[JsonSchema]:
    """Headers for who writes, why and when.

    In local mode the caller must name itself; else it may, if its token permits the claim.
    """
    short = {**_TEXT, "maxLength": 500}
    found = [
        header(names.ACTOR, short, "The user or system on whose behalf the caller writes."),
        header(names.REASON, short, "Why the change is made."),
        header(names.CORRELATION, short, "Id of the process that the change belongs to."),
        header(names.CAUSATION, short, "Id of what caused the change."),
        header(names.OCCURRED_AT, TIME, "When it happened in the world. Default: now."),
    ]
    default = "" if local else " Default: that of the token."
    for name, what in (
        (names.SERVICE, "The service that writes."),
        (names.IDENTIFIER, "The user, job or instance of the service."),
    ):
        found.append(header(name, short, f"{what}{default}", required=local))
    return found


def answers(
    *statuses: int, content: Mapping[str, JsonSchema] | None = None, secured: bool
) -> dict[int | str, JsonSchema]:
    """Answers of a route: its own schemas by media type when it succeeds, else a problem."""
    listed = {*statuses, 503, *((401, 403, 429) if secured else ())}
    return {status: _answer(status, content) for status in sorted(listed)}


def _answer(status: int, content: Mapping[str, JsonSchema] | None) -> JsonSchema:
    found: JsonSchema = {"description": _WHAT[status]}
    if status >= 400:
        content = {PROBLEM: {"$ref": REF.format(model="Problem")}}
    elif status not in (200, 201):
        content = None
    if content is not None:
        found["content"] = {kind: {"schema": schema} for kind, schema in content.items()}
    return found


def add_headers(
    responses: Mapping[int | str, JsonSchema],
    statuses_by_name: Mapping[str, Sequence[int]],
    **more: Any,
) -> None:
    """Describe headers in the answers that have them; ``more``: members of each description."""
    for name, statuses in statuses_by_name.items():
        for status in statuses:
            responses[status].setdefault("headers", {})[name] = {"schema": STRING, **more}


def header(name: str, schema: JsonSchema, what: str, *, required: bool = False) -> JsonSchema:
    """A parameter that is a header."""
    return {**query(name, schema, what), "in": "header", "required": required}


def in_path(name: str, schema: JsonSchema, what: str) -> JsonSchema:
    """A parameter that is a part of the path."""
    return {**query(name, schema, what), "in": "path", "required": True}


KEY_IN_PATH: Final[JsonSchema] = {
    "name": "key",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "title": "Key"},
}


def query(name: str, schema: JsonSchema, what: str) -> JsonSchema:
    """A parameter of the query."""
    return {"name": name, "in": "query", "schema": schema, "description": what}


def text(name: str, what: str) -> JsonSchema:
    """A parameter of the query that is any text."""
    return query(name, STRING, what)
