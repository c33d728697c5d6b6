"""How views stand, for those that only read."""

from __future__ import annotations

from everstate.views.control.positions import Positions
from everstate.views.control.registry import Registry


class Standings(Positions, Registry):
    """Versions of views and their positions."""
