"""Who may read a view: who may read every entity type that it is computed from, without a mask.

A row of a view may have the values of any field of these types under another name, so that a
caller from whom fields are hidden does not see the rows at all.
"""

from __future__ import annotations

from fastapi import Request
from starlette.requests import HTTPConnection

from everstate.http.answers import HttpRequest
from everstate.http.asgi import Desk, headers_of
from everstate.http.callers import Caller
from everstate.serving.masking import entities_read_by
from everstate.views.project import Project


def admit_to_view(desk: Desk, connection: HTTPConnection, project: Project) -> Caller:
    """The caller, who may read the view of the path.

    Raises Unauthenticated, TooManyRequests, and NotPermitted also where a field is hidden.
    """
    view = connection.path_params["view"]
    entities = entities_read_by(project, view)
    caller = desk.admit(connection, entities[0], "read")
    for entity in entities:
        desk.admit(connection, entity, "read")
        caller.mask(entity).refuse_all(f"the rows of view {view}")
    return caller


async def read_of_view(desk: Desk, request: Request, project: Project) -> HttpRequest:
    """The request of a caller who may read the view of its path."""
    admit_to_view(desk, request, project)
    return await desk.read(
        request, entities_read_by(project, request.path_params["view"])[0], "read"
    )


async def read_of_any(desk: Desk, request: Request) -> HttpRequest:
    """The request of any caller, for an answer that has only what the caller may see."""
    caller = desk.admit_any(request)
    return HttpRequest(
        method=request.method, path=request.url.path, headers=headers_of(request), caller=caller
    )
