"""Reading: entities now and at any time, lists, histories, explanations, state of the views."""

from everstate.serving.answers import (
    ColdRead,
    Entity,
    Explanation,
    FoundRow,
    Place,
    Version,
    ViewLag,
    ViewRow,
)
from everstate.serving.differences import ABSENT, Difference, differences
from everstate.serving.moments import parse_moment
from everstate.serving.reader import Reader

__all__ = [
    "ABSENT",
    "ColdRead",
    "Difference",
    "Entity",
    "Explanation",
    "FoundRow",
    "Place",
    "Reader",
    "Version",
    "ViewLag",
    "ViewRow",
    "differences",
    "parse_moment",
]
