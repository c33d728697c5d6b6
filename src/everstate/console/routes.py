"""The page of the API's routes, made of its OpenAPI description: a browser needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class DescribedRoute:
    """One route, as the page shows it."""

    method: str
    path: str
    summary: str
    parameters: Sequence[tuple[str, str, str]]
    """Name, place and meaning."""
    bodies: Mapping[str, str]
    """Schema of a body by media type."""
    answers: Mapping[str, str]
    """Meaning by status."""


def described_routes(openapi: Mapping[str, Any]) -> dict[str, list[DescribedRoute]]:
    """The routes by their tags, in the order of the description."""
    found: dict[str, list[DescribedRoute]] = {}
    for path, operations in openapi["paths"].items():
        for method, said in operations.items():
            route = DescribedRoute(
                method=method.upper(),
                path=path,
                summary=said.get("summary", ""),
                parameters=[
                    (each["name"], each["in"], each.get("description", ""))
                    for each in said.get("parameters", ())
                ],
                bodies={
                    kind: _text(each.get("schema", {}))
                    for kind, each in said.get("requestBody", {}).get("content", {}).items()
                },
                answers={
                    status: each.get("description", "")
                    for status, each in said.get("responses", {}).items()
                },
            )
            found.setdefault(next(iter(said.get("tags", ())), "server"), []).append(route)
    return found


def schemas_of(openapi: Mapping[str, Any]) -> dict[str, str]:
    """The named schemas as JSON."""
    return {
        name: _text(each) for name, each in openapi.get("components", {}).get("schemas", {}).items()
    }


def _text(schema: Any) -> str:
    return orjson.dumps(schema, option=orjson.OPT_INDENT_2).decode()
