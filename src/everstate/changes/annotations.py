"""The type that an annotation means, behind a name that Python or pydantic has for it. Pure."""

from __future__ import annotations

from datetime import date, datetime
from typing import Any, Final, get_args, get_origin

from pydantic import PastDate, PastDatetime
from typing_inspection.typing_objects import is_newtype, is_typealiastype

_MEANT: Final[dict[Any, Any]] = {PastDate: date, PastDatetime: datetime}


def meant(annotation: Any) -> Any:
    """The annotation without `NewType`, the alias of a type, or `PastDate`.

    Any other annotation is returned unchanged; its parts may have such names too.
    """
    while True:
        origin = get_origin(annotation)
        if is_newtype(annotation):
            annotation = annotation.__supertype__
        elif is_typealiastype(annotation):
            annotation = annotation.__value__
        elif is_typealiastype(origin):
            annotation = origin.__value__[get_args(annotation)]
        elif isinstance(annotation, type):
            return _MEANT.get(annotation, annotation)
        else:
            return annotation
