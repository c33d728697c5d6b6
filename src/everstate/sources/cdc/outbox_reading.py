"""Parses a record of Debezium's outbox router into a change; pure, for Spark's tasks too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Final

import msgspec

from everstate.changes import ChangeCodec, Kind, derived_change_id
from everstate.errors import CorruptRecord, InvalidChange
from everstate.log.record import Record
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.reading import Parsed, RawReader, RefusedRow
from everstate.sources.cdc.rows import AGGREGATE, FACTS, KIND
from everstate.sources.outbox.router_records import RouterReader, header_text, is_uuid, row_identity

POSITION: Final = "outbox"
"""Scheme of a change's source position: the id of its outbox row as a UUID, and of a fact with a
number a hash of its row, since the number may come again."""
VERSION: Final = "version"
_VERSION_MAX: Final = 2**63 - 1
FACT: Final = "e"
"""Operation of a row that is a fact."""
_OPS: Final = {Kind.CREATED: "c", Kind.UPDATED: "u", Kind.DELETED: "d", Kind.EVENT: FACT}


class Routed(msgspec.Struct, rename="camel", gc=False):
    """The fields that are read of a routed change's envelope."""

    id: str
    kind: str
    recorded_at: str
    provenance: _Service
    event: _Event | None = None
    current_entity_state: msgspec.Raw = msgspec.Raw(b"null")
    original_entity_state: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def current(self) -> bytes | None:
        """State after, as JSON; ``None``: it was deleted."""
        return _state(self.current_entity_state)

    @property
    def original(self) -> bytes | None:
        """State before, as JSON; ``None``: it did not exist."""
        return _state(self.original_entity_state)


class _Service(msgspec.Struct, rename="camel", gc=False):
    service_name: str


class _Event(msgspec.Struct, gc=False):
    type: str


_decode_routed = msgspec.json.Decoder(Routed).decode


@dataclass(frozen=True)
class RoutedReader(RawReader):
    """Reads the records of one outbox capture's raw topics; can be sent to other processes.

    Debezium's router takes out of a row which transaction it is of; its transaction is "", and the
    stream finds it between the records BEGIN and END.

    A row's ``state`` is the whole message as it will be published, ``known`` the version that the
    service assigned, its ``table`` the aggregate type.
    """

    message_bytes_max: int = 1_048_576
    ahead_hours: float | None = None
    """How far ahead of its record a change may have occurred (`log.occurred_ahead_hours`)."""

    @cached_property
    def _routes(self) -> dict[str, tuple[RouterReader, ChangeCodec]]:
        outbox = self.capture.outbox
        assert outbox is not None, "the capture is of an outbox"
        source = f"{self.capture.name}/{outbox.table}"
        found = {}
        for name, each in outbox.aggregates.items():
            of, facts = self.entities[each.entity], each.facts
            reader = RouterReader(of, source, provenance=each.provenance, is_event=facts)
            codec = ChangeCodec(
                of, message_bytes_max=self.message_bytes_max, ahead_hours=self.ahead_hours
            )
            found[name] = reader, codec
        return found

    @property
    def header_names(self) -> tuple[str, ...]:
        """Headers of a record that :meth:`read` wants, in their order."""
        return (KIND, AGGREGATE, "id", "eventType")

    def read(
        self,
        name: str,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[bytes | None] = (None, None, None, None),
        timestamp_ms: int = 0,
    ) -> list[Parsed]:
        """The change of one record of the raw topic ``….<name>``, or its refusal; never fails.

        ``name`` is the aggregate type; "" is the one raw log of a capture, where a header has the
        type. ``timestamp_ms``, milliseconds since 1970, is when the change was recorded. A
        tombstone gives an empty list.
        """
        kind, aggregate, *_ = headers
        if kind in FACTS and not name:
            return self._fact(kind, key, value)
        name = name or (aggregate or b"").decode(errors="replace").strip('"')
        if name not in self._routes:
            return []
        reader, codec = self._routes[name]
        try:
            named_headers = tuple(zip(self.header_names, headers, strict=True))
            record = Record(name, 0, 0, timestamp_ms, key, value, named_headers)
            change = reader.read(record)
            if change is None:
                return []
            if change.version > _VERSION_MAX:
                raise InvalidChange(change.entity, change.key, VERSION, "it is beyond 64 bits")
            position = {POSITION: _place(reader, change.kind, value, headers)}
            (table,) = self.capture.captured_tables
            source = {"capture": self.capture.name, "table": table, "position": position}
            _, state, _ = codec.encode(msgspec.structs.replace(change, extra={"source": source}))
        except CorruptRecord as cause:
            return [RefusedRow(table=name, reason=cause.reason, transaction="")]
        except (InvalidChange, ValueError, TypeError, RecursionError) as cause:
            return [RefusedRow(table=name, reason=str(cause), transaction="")]
        return [
            CleanRow(
                table=name,
                op=_OPS[change.kind],
                key=change.key,
                columns={},
                state=state,
                known={VERSION: change.version},
                position=position,
                transaction="",
            )
        ]


def routed(row: CleanRow) -> Routed:
    """The decoded message of a row of :class:`RoutedReader`."""
    assert row.state is not None
    return _decode_routed(row.state)


def under_another_key(row: CleanRow) -> CleanRow:
    """The row of a fact whose number an earlier row had: its key also has the hash of the row."""
    assert row.state is not None
    identity, content = row.position[POSITION]
    key = f"{row.key}-{content}"
    fields = msgspec.json.decode(row.state, type=dict[str, msgspec.Raw])
    own = {"id": str(derived_change_id(str(identity), key, 0)), "key": key}
    fields |= {name: msgspec.Raw(msgspec.json.encode(text)) for name, text in own.items()}
    return msgspec.structs.replace(row, key=key, state=msgspec.json.encode(fields))


def _place(
    reader: RouterReader, kind: Kind, value: bytes | None, headers: Sequence[bytes | None]
) -> list[int | str]:
    *_, header, event = headers
    row_id = header_text(header or b"")
    place: list[int | str] = [str(row_identity(reader.source, row_id))]
    if kind is Kind.EVENT and not is_uuid(row_id):
        place.append(blake2b(b"%b\n%b" % (event or b"", value or b""), digest_size=8).hexdigest())
    return place


def _state(raw: msgspec.Raw) -> bytes | None:
    found = bytes(raw)
    return None if found == b"null" else found
