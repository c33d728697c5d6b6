"""What flows through the log: changes, provenance, entity types, codecs and schemas. No I/O."""

from everstate.changes.change import Change, DomainEvent, Kind, Provenance, SourceTransaction
from everstate.changes.codec import ChangeCodec
from everstate.changes.entity import EntityType
from everstate.changes.ids import derived_change_id, new_change_id

__all__ = [
    "Change",
    "ChangeCodec",
    "DomainEvent",
    "EntityType",
    "Kind",
    "Provenance",
    "SourceTransaction",
    "derived_change_id",
    "new_change_id",
]
