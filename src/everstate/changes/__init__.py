"""What flows through the log: changes, provenance, entity types, codecs and schemas. No I/O."""

from everstate.changes.change import PROVENANCE_FIELDS as PROVENANCE_FIELDS
from everstate.changes.change import Change as Change
from everstate.changes.change import DomainEvent as DomainEvent
from everstate.changes.change import Kind as Kind
from everstate.changes.change import Provenance as Provenance
from everstate.changes.change import SourceTransaction as SourceTransaction
from everstate.changes.codec import ChangeCodec as ChangeCodec
from everstate.changes.entity import EntityType as EntityType
from everstate.changes.ids import derived_change_id as derived_change_id
from everstate.changes.ids import new_change_id as new_change_id
