"""The page of the API's routes, made of its OpenAPI description: a browser needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def described_routes(openapi: Mapping[str, Any]) -> dict[str, list[tuple[str, str, Any]]]:
    """The routes by their tags, in the order of the description: method, path, its operation."""
    found: dict[str, list[tuple[str, str, Any]]] = {}
    for path, operations in openapi["paths"].items():
        for method, said in operations.items():
            tag = next(iter(said.get("tags", ())), "server")
            found.setdefault(tag, []).append((method.upper(), path, said))
    return found
