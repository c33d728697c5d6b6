"""The outbox: a store in PostgreSQL as source of truth, and the relay to the log.

Other people's services emit their changes with :func:`emit`, in their own transactions.
"""

from typing import TYPE_CHECKING

from everstate.lazily import loader
from everstate.sources.outbox.emit import emit as emit
from everstate.sources.outbox.emit import emit_async as emit_async
from everstate.sources.outbox.emit import emit_event as emit_event

if TYPE_CHECKING:
    from everstate.sources.outbox.importing import Checked as Checked
    from everstate.sources.outbox.importing import Imported as Imported
    from everstate.sources.outbox.importing import check_file as check_file
    from everstate.sources.outbox.importing import import_file as import_file
    from everstate.sources.outbox.installing import Installation as Installation
    from everstate.sources.outbox.installing import Registered as Registered
    from everstate.sources.outbox.installing import install_outbox as install_outbox
    from everstate.sources.outbox.installing import read_emitters as read_emitters
    from everstate.sources.outbox.installing import read_registered as read_registered
    from everstate.sources.outbox.marks import Blocked as Blocked
    from everstate.sources.outbox.marks import OutboxStatus as OutboxStatus
    from everstate.sources.outbox.marks import read_status as read_status
    from everstate.sources.outbox.relay import Relay as Relay
    from everstate.sources.outbox.schema import install as install
    from everstate.sources.outbox.slot import SlotStatus as SlotStatus
    from everstate.sources.outbox.slot import drop_slot as drop_slot
    from everstate.sources.outbox.slot import read_slot as read_slot
    from everstate.sources.outbox.store import EntityStore as EntityStore
    from everstate.sources.outbox.store import Versioned as Versioned
    from everstate.sources.outbox.store import Written as Written
    from everstate.sources.outbox.store import WrittenMany as WrittenMany
    from everstate.sources.outbox.streaming import StreamingRelay as StreamingRelay
    from everstate.sources.outbox.streaming import relay_of as relay_of

__getattr__ = loader(
    __name__,
    {
        "everstate.sources.outbox.importing": ("Checked", "Imported", "check_file", "import_file"),
        "everstate.sources.outbox.installing": (
            "Installation",
            "Registered",
            "install_outbox",
            "read_emitters",
            "read_registered",
        ),
        "everstate.sources.outbox.marks": ("Blocked", "OutboxStatus", "read_status"),
        "everstate.sources.outbox.relay": ("Relay",),
        "everstate.sources.outbox.schema": ("install",),
        "everstate.sources.outbox.slot": ("SlotStatus", "drop_slot", "read_slot"),
        "everstate.sources.outbox.store": ("EntityStore", "Versioned", "Written", "WrittenMany"),
        "everstate.sources.outbox.streaming": ("StreamingRelay", "relay_of"),
    },
)
