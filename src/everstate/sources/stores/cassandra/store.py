"""The source of truth in Cassandra: each write is one conditional batch in one partition."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any, Final
from uuid import UUID, uuid5

from everstate.cassandra import Database
from everstate.changes import DomainEvent, EntityType, Provenance
from everstate.changes.keys import check_key
from everstate.config import Config
from everstate.errors import (
    ChangeTooLarge,
    EverstateError,
    InvalidQuery,
    Unavailable,
)
from everstate.sources.stores.cassandra.partition import Head, Partitions, WriteStep
from everstate.sources.stores.cassandra.schema import (
    TOKEN_MAX,
    TOKEN_MIN,
    CassandraStatements,
    IndexStatements,
    install,
)
from everstate.sources.stores.rows import (
    ENVELOPE_BYTES,
    PreparedRow,
    bytes_of,
    carried,
    check_expected,
    kind_of,
    prepare,
    row_of,
    shown_for_missing,
)
from everstate.sources.stores.store import (
    PAGE_BYTES_MAX,
    AnsweredBefore,
    GivenEntity,
    Kept,
    Once,
    OneOrEach,
    Page,
    Scalar,
    Store,
    Versioned,
    Write,
    Written,
    WrittenMany,
)

_AT_ONCE: Final = 32
_ONCE: Final = UUID("8a6a7a4e-5a55-5d3e-9d5e-2f3f6f0f6c11")
_KEY_BYTES_MAX: Final = 65_535
_LOOKED_MAX: Final = 20
_PART_BYTES_MAX: Final = 1_048_576
_SAME_TOKEN_MAX: Final = 1_000
"""Keys with one token that a cursor may skip: two keys hardly ever have the same one."""
_ROWS_AT_ONCE: Final = 16
_CURSOR: Final = re.compile(r"(-?[0-9]{1,19})\.([0-9]{1,6})")


def version_of(config: Config, entity: str, key: str) -> int | None:
    """Committed version of an entity, also of a deleted one; ``None``: it never existed.

    Uses connections of its own. Raises Unavailable, and SourceError when nothing is installed.
    """
    with Database(config) as database:
        head = CassandraStatements(database.keyspace, entity).head
        rows = database.execute(head, [check_key(entity, key)])
    return None if not rows else rows[0].head_version


class CassandraStore(Store):
    """The entities of one type in Cassandra; the log follows it.

    A write that returned is durable, and the next ``get`` returns it. The publisher sends its
    change to the log; it finds the change by the announcement made before the write. After a crash
    at any point between the two, the change is published within seconds of the publisher's restart.

    Threads may share a store. Close it, or use it as a context manager. With ``database`` the
    connections are the caller's.
    """

    def __init__(
        self, config: Config, entity_type: EntityType, *, database: Database | None = None
    ) -> None:
        self.entity_type = entity_type
        self._limit = config.log.message_bytes_max
        self._ahead_hours = config.log.occurred_ahead_hours
        self._answer_ttl_s = max(1, int(config.api.idempotency_keep_hours * 3600))
        self._owned = database is None
        self._database = database or Database(config)
        self._sql = CassandraStatements(self._database.keyspace, entity_type.name)
        self._index = IndexStatements(self._database.keyspace)
        self._partitions = Partitions(self._database, entity_type.name, entity_type.schema_version)

    def close(self) -> None:
        """Close the connections, unless they are the caller's."""
        if self._owned:
            self._database.close()

    def install(self) -> None:
        """Create keyspace and tables; idempotent. Needs the right to do so."""
        install(self._database, (self.entity_type.name,))

    def get(self, key: str) -> Versioned | None:
        """The committed entity; ``None``: it never existed, or was deleted."""
        head = self._partitions.head(self._key(key))
        if head.state is None:
            return None
        return Versioned(self.entity_type.validate_json(head.state), head.version)

    def deleted_version(self, key: str) -> int | None:
        """The version that deleted the entity; ``None``: it exists, or never did."""
        head = self._partitions.head(self._key(key))
        return head.version if head.state is None and head.version else None

    def page(
        self, *, limit: int, cursor: str | None = None, equal: Mapping[str, Scalar] | None = None
    ) -> Page:
        """At most ``limit`` entities in the order of their tokens, which differs from key order.

        Filters are applied here, not by the server. Cost: at most 20 reads of ``limit`` rows.
        """
        token, skip = _place(cursor)
        found, missing = list[Versioned](), shown_for_missing(self.entity_type.model, equal or {})
        for _ in range(_LOOKED_MAX):
            wanted = limit - len(found)
            rows, is_cut = self._rows(token, skip, wanted)
            for row in rows[skip:]:
                after = self.entity_type.today(row.after)
                if after is not None and _meets(after, equal, missing):
                    entity = self.entity_type.validate_json(after)
                    found.append(Versioned(entity, row.head_version))
            if len(rows) < skip + wanted and not is_cut:
                return Page(found, None)
            token = rows[-1].place
            # Keys with the same token come in a stable order: count those that were read.
            skip = sum(1 for row in rows if row.place == token)
            if len(found) == limit or is_cut:
                break
        return Page(found, f"{token}.{skip}")

    def _rows(self, token: int, skip: int, wanted: int) -> tuple[list[Any], bool]:
        """Rows from a token on, and whether these are fewer because they are large."""
        rows, size = list[Any](), 0
        values = [token, skip + wanted]
        for row in self._database.stream(self._sql.page, values, skip + _ROWS_AT_ONCE):
            rows.append(row)
            size += bytes_of(row.after) if len(rows) > skip else 0
            if size >= PAGE_BYTES_MAX:
                return rows, len(rows) < skip + wanted
        return rows, False

    def write(self, write: Write) -> Written:
        """Create, update or delete an entity; see :meth:`Store.write`.

        Cost: a read, an insert, and a conditional write, which needs four replica round trips.
        """
        row = row_of(self.entity_type, write, datetime.now(UTC), self._ahead_hours)
        self._key(row.key)
        if write.once is not None:
            return self._write_once(row, write, write.once)
        head, steps = self._partitions.move(row.key, lambda head: self._one(head, row, write))
        return _written(row, head, steps)

    def put_many(
        self,
        entities: Iterable[GivenEntity],
        *,
        provenance: OneOrEach[Provenance],
        occurred_at: OneOrEach[datetime] | None = None,
        event: OneOrEach[DomainEvent | None] = None,
        force: bool = False,
    ) -> WrittenMany:
        """Create or update many entities; several states of one key in their order.

        Everything is checked before the first write, but Cassandra has no transactions over several
        keys: after Unavailable some may be written, and the call may be repeated.
        """
        rows = prepare(
            self.entity_type,
            entities if isinstance(entities, list) else list(entities),
            provenance=provenance,
            occurred_at=datetime.now(UTC) if occurred_at is None else occurred_at,
            event=event,
            ahead_hours=self._ahead_hours,
        )
        by_key: dict[str, list[PreparedRow]] = {}
        count = 0
        for count, row in enumerate(rows, 1):  # noqa: B007
            # Also refuses a change that is too large.
            kind_of(self.entity_type, row, None, force=force, limit=self._limit)
            by_key.setdefault(self._key(row.key), []).append(row)

        def write(chain: list[PreparedRow]) -> int:
            done = 0
            for part in _parts(chain):
                plan = partial(self._chain, rows=part, force=force)
                _, steps = self._partitions.move(part[0].key, plan)
                done += len(steps)
            return done

        with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(by_key)))) as pool:
            written = list(pool.map(write, by_key.values()))
        changes = sum(written)
        keys = sum(1 for steps in written if steps)
        return WrittenMany(changes=changes, keys=keys, unchanged=count - changes)

    def answered(self, once_id: str) -> Kept | None:
        """The answer of a finished :class:`Once`, kept for `api.idempotency_keep_hours`."""
        rows = self._database.execute(self._index.answered, [once_id], serial=True)
        if not rows or rows[0].answer is None:
            return None
        return Kept(rows[0].fingerprint, rows[0].answer)

    def answer_of(self, once: Once, key: str) -> Kept | None:
        """As :meth:`Store.answer_of`. Cost: one read, three more if no answer was kept yet."""
        rows = self._database.execute(self._index.answered, [once.id], serial=True)
        if not rows:
            return None
        taken = rows[0]
        if taken.answer is not None:
            return Kept(taken.fingerprint, taken.answer)
        if taken.fingerprint != once.fingerprint:
            return None
        self._partitions.head(self._key(key), serial=True)  # settles a write in progress
        written = self._done(once, key, taken.since or 0)
        if written is None:
            return None
        self._answer(once, written)
        return Kept(once.fingerprint, once.answer(written))

    def _write_once(self, row: PreparedRow, write: Write, once: Once) -> Written:
        """Write under a change id that is derived from the request, so that it can be found again.

        The request's id is inserted first, conditionally. A process that finds it inserted by an
        equal request without an answer does the same write: the change id is the same, and a
        partition accepts it once. Only then it searches for that change, among the versions since
        the first request.
        """
        row = row._replace(change_id=_change_id(once))
        since: int | None = None

        def plan(head: Head) -> Sequence[WriteStep]:
            nonlocal since
            if since is None:
                since, is_first = self._take(once, head)
                if is_first:
                    return self._one(head, row, write)
            done = self._done(once, row.key, since)
            if done is not None:
                raise _DoneBefore(done)
            return self._one(head, row, write)

        try:
            head, steps = self._partitions.move(row.key, plan)
        except _DoneBefore as done:
            self._answer(once, done.written)
            raise AnsweredBefore(once.id) from None
        except Unavailable:
            raise
        except EverstateError:
            # Refused: nothing was written, and the request's id is deleted again.
            self._conditional(self._index.drop_once, [once.id, once.fingerprint])
            raise
        written = _written(row, head, steps)
        self._answer(once, written)
        return written

    def _done(self, once: Once, key: str, since: int) -> Written | None:
        """The request's write, with the state that it stored; ``None``: it was not done."""
        change_id = _change_id(once)
        found = self._partitions.version_of(key, change_id, since)
        if found is None:
            return None
        version, kind, state = found
        entity = None if state is None else self.entity_type.validate_json(state)
        return Written(key=key, version=version, kind=kind, change_id=change_id, entity=entity)

    def _take(self, once: Once, head: Head) -> tuple[int, bool]:
        """Version before the request's change, if it was done; and whether this is the first try.

        Raises AnsweredBefore when the id was answered, or taken by another request.
        """
        values = [once.id, once.fingerprint, head.version, self._answer_ttl_s]
        taken = self._conditional(self._index.take_once, values)
        if taken[0]:
            return head.version, True
        if taken.answer is not None or taken.fingerprint != once.fingerprint:
            raise AnsweredBefore(once.id)
        return taken.since or 0, False

    def _answer(self, once: Once, written: Written) -> None:
        values = [self._answer_ttl_s, once.fingerprint, once.answer(written), once.id]
        self._conditional(self._index.answer_once, [*values, once.fingerprint])

    def _conditional(self, statement: str, values: Sequence[Any]) -> Any:
        """First row of a conditional statement that is safe to repeat."""
        return self._database.execute(statement, values)[0]

    def _one(self, head: Head, row: PreparedRow, write: Write) -> Sequence[WriteStep]:
        name = self.entity_type.name
        check_expected(name, row, head.state, head.version, write.expected_version)
        return self._chain(head, [row], write.force)

    def _chain(self, head: Head, rows: Sequence[PreparedRow], force: bool) -> Sequence[WriteStep]:
        """Steps for states of one key, each following the one before; equal ones are left out."""
        steps, before = list[WriteStep](), head.state
        for given in rows:
            row = carried(self.entity_type, given, before)
            kind = kind_of(self.entity_type, row, before, force=force, limit=self._limit)
            if kind is not None:
                steps.append(WriteStep(head.version + len(steps) + 1, kind, row, before))
                before = row.state
        return steps

    def _key(self, key: str) -> str:
        check_key(self.entity_type.name, key)
        if bytes_of(key) > _KEY_BYTES_MAX:
            raise ChangeTooLarge(self.entity_type.name, key[:40], bytes_of(key), _KEY_BYTES_MAX)
        return key


def _parts(chain: Sequence[PreparedRow]) -> Iterator[Sequence[PreparedRow]]:
    """A key's rows in parts that fit the server's limit for a mutation."""
    size, start = 0, 0
    for at, row in enumerate(chain):
        size += bytes_of(row.state) + ENVELOPE_BYTES
        if size > _PART_BYTES_MAX and at > start:
            yield chain[start:at]
            start, size = at, bytes_of(row.state) + ENVELOPE_BYTES
    yield chain[start:]


class _DoneBefore(Exception):
    """The change of this request was written before."""

    def __init__(self, written: Written) -> None:
        self.written = written
        super().__init__(written.key)


def _change_id(once: Once) -> UUID:
    """Id of the change of a request, so that the change can be found again."""
    return uuid5(_ONCE, once.id)


def _written(row: PreparedRow, head: Head, steps: Sequence[WriteStep]) -> Written:
    if not steps:
        return Written(key=row.key, version=head.version)
    step = steps[-1]
    return Written(key=row.key, version=step.version, kind=step.kind, change_id=step.row.change_id)


def _meets(state: str, equal: Mapping[str, Scalar] | None, missing: Mapping[str, Scalar]) -> bool:
    """``missing``: the values of attributes that the state does not have."""
    if not equal:
        return True
    fields = {**missing, **json.loads(state)}
    return all(name in fields and _is_equal(fields[name], each) for name, each in equal.items())


def _is_equal(found: Any, wanted: Scalar) -> bool:
    if isinstance(wanted, Decimal):
        with suppress(InvalidOperation):
            return Decimal(str(found)) == wanted
        return False
    return bool(found == wanted) and isinstance(found, bool) == isinstance(wanted, bool)


def _place(cursor: str | None) -> tuple[int, int]:
    """The token at which a page starts, and how many keys with that token were read already."""
    if cursor is None:
        return TOKEN_MIN, 0
    parts = _CURSOR.fullmatch(cursor)
    if (
        parts is None
        or not TOKEN_MIN <= int(parts[1]) <= TOKEN_MAX
        or int(parts[2]) > _SAME_TOKEN_MAX
    ):
        raise InvalidQuery("cursor: expected the cursor of an earlier page.")
    return int(parts[1]), int(parts[2])
