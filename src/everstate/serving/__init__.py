"""Ways out: entities now and at any time, lists, histories, explanations, how the views stand."""

from everstate.serving.answers import Entity, Explanation, Place, Standing, Version, ViewRow
from everstate.serving.differences import ABSENT, Difference, differences
from everstate.serving.moments import parse_moment
from everstate.serving.reader import Reader

__all__ = [
    "ABSENT",
    "Difference",
    "Entity",
    "Explanation",
    "Place",
    "Reader",
    "Standing",
    "Version",
    "ViewRow",
    "differences",
    "parse_moment",
]
