"""Control tables of the views' database, behind one class.

Positions, versions of views, the core's exceptions, dead letters, and requests of commands to a
running pipeline. No other module has SQL on these tables.
"""

from typing import TYPE_CHECKING

from everstate.lazily import loader

if TYPE_CHECKING:
    from everstate.views.control.control import Control as Control
    from everstate.views.control.control import ControlConnection as ControlConnection
    from everstate.views.control.control import opened_control as opened_control
    from everstate.views.control.dead_letters import DeadChange as DeadChange
    from everstate.views.control.positions import ViewPosition as ViewPosition
    from everstate.views.control.registry import BUILDING as BUILDING
    from everstate.views.control.registry import DROPPED as DROPPED
    from everstate.views.control.registry import KEPT as KEPT
    from everstate.views.control.registry import LIVE as LIVE
    from everstate.views.control.registry import RETIRED as RETIRED
    from everstate.views.control.registry import WAITING as WAITING
    from everstate.views.control.registry import ViewVersion as ViewVersion
    from everstate.views.control.requests import QUERY as QUERY
    from everstate.views.control.requests import RECOMPUTE as RECOMPUTE
    from everstate.views.control.requests import Request as Request
    from everstate.views.control.statuses import ViewStatuses as ViewStatuses

# Reading an entity needs the state of its view, but neither Arrow nor Kafka.
__getattr__ = loader(__name__)
