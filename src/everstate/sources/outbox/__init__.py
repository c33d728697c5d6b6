"""The outbox: services emit changes in their own transactions, and the relay moves them to the log.

The store in PostgreSQL writes its changes to the same outbox (`sources.stores.postgres`).
"""

from typing import TYPE_CHECKING

from everstate.lazily import loader
from everstate.sources.outbox.emit import emit as emit
from everstate.sources.outbox.emit import emit_async as emit_async
from everstate.sources.outbox.emit import emit_event as emit_event

if TYPE_CHECKING:
    from everstate.sources.outbox.installing import Installation as Installation
    from everstate.sources.outbox.installing import Registered as Registered
    from everstate.sources.outbox.installing import install_outbox as install_outbox
    from everstate.sources.outbox.installing import read_emitters as read_emitters
    from everstate.sources.outbox.installing import read_registered as read_registered
    from everstate.sources.outbox.marks import Blocked as Blocked
    from everstate.sources.outbox.marks import OutboxStatus as OutboxStatus
    from everstate.sources.outbox.marks import read_status as read_status
    from everstate.sources.outbox.relay import Relay as Relay

__getattr__ = loader(__name__)
