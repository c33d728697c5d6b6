"""Detects a captured database that was replaced or restored, before a connector reads it.

The position record that cleaning commits also stores which server was read, and the place in its
log that was reached. `everstate cdc` writes a record into the raw log that names the server that
is read from there on, and the epoch that its positions belong to.
"""

from __future__ import annotations

from everstate.config import Config
from everstate.declarations.captures import Capture
from everstate.errors import LogError, SourceReplaced
from everstate.log.producer import Producer
from everstate.log.publisher import read_progress
from everstate.log.record import OutRecord
from everstate.sources.cdc.balance import decode_note, publisher_name
from everstate.sources.cdc.database import CapturedDatabase
from everstate.sources.cdc.names import CaptureNames
from everstate.sources.cdc.reading import SourceIdentity, encode_source
from everstate.sources.cdc.rows import KIND, SOURCE
from everstate.sources.cdc.stream import StreamStanding


def known_standing(config: Config, capture: Capture) -> StreamStanding:
    """The standing of a capture's raw log in its last position record; reads Kafka only."""
    try:
        progress = read_progress(config, publisher_name(capture.name))
    except LogError:
        progress = None
    found = None if progress is None else decode_note(progress.note).stream
    return found or StreamStanding(epoch=capture.epoch)


def check_source(capture: Capture, database: CapturedDatabase, known: StreamStanding) -> str:
    """Identity of the database that a capture has now.

    Raises SourceReplaced when it is another database than before, or its log ends before a place
    that was read. A declaration with a higher epoch confirms the replacement: nothing is raised.
    """
    identity = database.identity()
    if capture.epoch > known.epoch:
        return identity
    if known.identity not in (None, identity):
        raise SourceReplaced(capture.name, f"it is {identity}, and was {known.identity}")
    reason = database.went_back(known.place)
    if reason is not None:
        raise SourceReplaced(capture.name, reason)
    return identity


def write_source(config: Config, names: CaptureNames, identity: str, epoch: int) -> None:
    """Write a record into the raw log that names the database that is read from here on."""
    value = encode_source(SourceIdentity(identity=identity, epoch=epoch))
    with Producer(config, client_id="everstate-cdc") as producer:
        producer.send(OutRecord(names.raw_log, None, value, [(KIND, SOURCE)]))
        producer.flush()
