"""Notices tables whose rows came, went or changed without row events.

PostgreSQL's log has no rows of a partition that is attached, detached, dropped or truncated, and no
log has any where columns are made anew or a label of an enum is renamed. So the clean role compares
a fingerprint of each captured table with the one from before, which is in the position record.
Statements of MariaDB that remove rows are in the raw log, where ``debezium.replaced_tables`` finds
them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from everstate.changes import EntityType
from everstate.config import Config
from everstate.declarations.captures import Capture
from everstate.sources.cdc.database import (
    EMPTY,
    PARTITION,
    REBUILT,
    CapturedDatabase,
    signal_snapshot,
)
from everstate.sources.cdc.mapping import mapping_of
from everstate.sources.cdc.names import CaptureNames
from everstate.sources.cdc.reading import STAY, Fingerprint, SourceIdentity
from everstate.sources.cdc.replaced import CheckedSource, Mark, mark_of, renew_mark, write_source
from everstate.sources.cdc.stream import StreamStanding

logger = logging.getLogger("everstate.sources.cdc")

Entities = Mapping[str, EntityType]
SeenChanges = dict[str, tuple[Fingerprint, Any]]
"""Changed table → what it was at its first look, and where the log ended then (`log_place`)."""
CHANGED: Final = "changed"
"""Rows may be new or have other values, and none is gone."""


def fingerprints(
    capture: Capture, entities: Entities, database: CapturedDatabase | None
) -> tuple[dict[str, Fingerprint], int]:
    """The fingerprint of each captured table, and the moment of the look; one query.

    None of an outbox, whose rows are facts that nobody takes back; none without a ``database``.
    """
    tables = [] if capture.outbox is not None else list(capture.tables)
    mappings = {name: one for name in tables if (one := mapping_of(capture, name, entities))}
    seen, states = database.table_states() if database and mappings else (0, {})
    found = {}
    for name, mapping in mappings.items():
        if (state := states.get(name)) is not None:
            # What is computed may read any column of a row.
            reads_all = bool(mapping.table.computed)
            read = {c for c in state.columns if reads_all or mapping.field_of(c) is not None}
            columns = (f"{column} {state.columns[column]}" for column in read)
            generated = _digest(read & set(state.generated))
            found[name] = Fingerprint(_digest(columns), generated, dict(state.parts))
    return found, seen


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:12]


def difference(
    known: Fingerprint | None, now: Fingerprint, survived: Callable[[str], bool]
) -> str | None:
    """What a table may have had without row events since the last look; ``None``: nothing.

    :data:`CHANGED`, or how rows may have gone. ``survived``: whether a row of a part is older.
    """
    if known is None or known == now:
        return None
    if known.generated != now.generated:
        return "a generated column, whose field is `computed`, became plain, or the reverse"
    if not known.parts:
        return CHANGED if known.columns != now.columns else None
    before = {part: file for part, file in known.parts.items() if not file.endswith(EMPTY)}
    gone = before.keys() - now.parts.keys()
    is_rebuilt = all(part.startswith(REBUILT) for part in gone) and not any(
        part.startswith(REBUILT) and survived(part) for part in now.parts
    )
    if gone and not is_rebuilt:
        return "a partition was detached or dropped, or another table took its name"
    other = {
        part
        for part, file in known.parts.items()
        if now.parts.get(part, file).removesuffix(EMPTY) != file.removesuffix(EMPTY)
        # An empty partition may have had rows until it was truncated.
        and (part in before or PARTITION in part)
    }
    # ALTER TABLE writes the rows of all parts anew, in its own transaction.
    is_altered = known.columns != now.columns and before.keys() - gone <= other
    lost = {
        part
        for part in other
        if (part in before and now.parts[part].endswith(EMPTY))
        or not (is_altered or survived(part))
    }
    if before and lost.isdisjoint(before) and before.keys() <= other:
        # VACUUM FULL of the whole table writes the empty partitions anew, too.
        lost -= {part for part in lost if now.parts[part].endswith(EMPTY)}
    if any(PARTITION in part for part in lost):
        return "a partition was truncated"
    new = [one for part, one in now.parts.items() if part not in known.parts]
    is_filled = any(not file.endswith(EMPTY) for file in new)
    return CHANGED if known.columns != now.columns or lost or is_filled else None


def _look(
    now: Mapping[str, Fingerprint], database: CapturedDatabase, known: StreamStanding, capture: str
) -> tuple[list[str], dict[str, str]]:
    """The tables to read again, and table → what `cdc status` shows of rows that it lost."""
    survived = partial(database.has_older_row, seen=known.seen)
    found = {table: difference(known.tables.get(table), now[table], survived) for table in now}
    gone = {
        table: STAY.format(how=how, capture=capture)
        for table, how in found.items()
        if how not in (None, CHANGED)
    }
    return [table for table, how in found.items() if how == CHANGED], gone


def gone_problems(
    capture: Capture, entities: Entities, database: CapturedDatabase, known: StreamStanding
) -> list[str]:
    """What `cdc status` shows of entities that may be in the log although their rows are gone."""
    now, _ = fingerprints(capture, entities, database)
    _, gone = _look(now, database, known, capture.name)
    return [f"{table}: {why}" for table, why in (gone | known.gone).items()]


def watch_tables(
    config: Config,
    capture: Capture,
    entities: Entities,
    database: CapturedDatabase,
    found: CheckedSource,
    before: SeenChanges,
    look: Callable[[Mark], Mark] = lambda mark: mark,
) -> None:
    """Write the next mark into a database, and have tables read again whose rows changed unseen.

    They are compared when cleaning has come to the last look, whose fingerprints it then knows.
    ``look``: adds to the mark what the connector does not see. ``before``: see :func:`due`.
    """
    known, last = found.known, mark_of(database.read_mark())
    names = CaptureNames(config.log.prefix, capture.name)
    mark = renew_mark(database, known.mark, look)
    if mark is None:
        return
    source = SourceIdentity(
        identity=found.identity, epoch=known.epoch, mark=mark.mark, look=mark.look
    )
    if last is None or last.mark != known.mark:
        write_source(config, names, source)
        return
    now, seen = fingerprints(capture, entities, database)
    listed, gone = _look(now, database, known, capture.name)
    changed = due({table: now[table] for table in listed}, database, last.looked_at, before)
    if changed:
        asked = signal_snapshot(database, changed)
        logger.warning(
            "capture %s: %s may have changed without row events, and is read again (signal %s)",
            *(capture.name, ", ".join(changed), asked),
        )
    # A table that lost rows is compared with the look before until a new epoch, and one that is not
    # read again yet until it is.
    later = {*gone, *listed} - set(changed)
    new = {t: one for t, one in now.items() if t not in later and known.tables.get(t) != one}
    source = replace(source, tables=new, seen=0 if later else seen)
    write_source(config, names, source)


def due(
    changed: Mapping[str, Fingerprint],
    database: CapturedDatabase,
    looked_at: str | None,
    before: SeenChanges,
) -> list[str]:
    """The changed tables that can be read again now; ``before`` keeps where each change was seen.

    Rows of an XA transaction that ended before the change may still be held; then those of the
    snapshot might be taken for the state before it (decision 88). ``looked_at``: the end of the
    last look at the log that cleaning knows; ``None``: no row is held until a look.
    """
    if looked_at is None:
        return list(changed)
    for table, one in changed.items():
        if table not in before or before[table][0] != one:
            before[table] = one, database.log_place()
    file, _, position = looked_at.rpartition(":")
    offset = {"file": file, "pos": position}
    return [table for table in changed if database.has_passed(offset, before[table][1])]
