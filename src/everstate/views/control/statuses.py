"""The status of views, for processes that only read."""

from __future__ import annotations

from everstate.views.control.deferred import DeferredChanges
from everstate.views.control.misfits import Misfits
from everstate.views.control.positions import Positions
from everstate.views.control.registry import Registry


class ViewStatuses(Positions, Registry, DeferredChanges, Misfits):
    """Versions of views, their positions, their deferred changes, and misfits."""
