"""The source of truth in Cassandra: each write is one conditional batch in one partition."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final
from uuid import UUID, uuid5

from everstate.changes import DomainEvent, EntityType, Kind, Provenance, new_change_id
from everstate.changes.keys import check_key
from everstate.config import Config
from everstate.errors import (
    ChangeTooLarge,
    EverstateError,
    InvalidQuery,
    NotFound,
    Unavailable,
    VersionConflict,
)
from everstate.sources.crud.store import AnsweredBefore, Kept, Once, Page, Scalar
from everstate.sources.crud.stores.cassandra.partition import Head, Partitions, Step
from everstate.sources.crud.stores.cassandra.schema import (
    TOKEN_MAX,
    TOKEN_MIN,
    IndexStatements,
    Statements,
    install,
)
from everstate.sources.crud.stores.cassandra.session import Database
from everstate.sources.outbox import Versioned, Written, WrittenMany
from everstate.sources.outbox.rows import (
    Entity,
    OneOrEach,
    Row,
    event_text,
    moment_text,
    prepare,
    provenance_text,
)
from everstate.sources.outbox.statements import ENVELOPE_BYTES, KEY_FACTOR

_AT_ONCE: Final = 32
_ONCE: Final = UUID("8a6a7a4e-5a55-5d3e-9d5e-2f3f6f0f6c11")
_KEY_BYTES_MAX: Final = 65_535
_LOOKED_MAX: Final = 20
_PART_BYTES_MAX: Final = 1_048_576
_CURSOR: Final = re.compile(r"(-?[0-9]{1,19})\.([0-9]{1,6})")


class CassandraStore:
    """A :class:`~everstate.sources.crud.store.Store` in Cassandra; the log comes second.

    A write that returned is durable and read back by the next ``get``. Its change goes to the log
    through the publisher, which finds it by the announcement made before the write; a crash
    anywhere between the two is mended within seconds of the publisher's return.

    Threads may share a store. Close it, or use it as a context manager. With ``database`` the
    connections are the caller's.
    """

    def __init__(
        self, config: Config, entity_type: EntityType, *, database: Database | None = None
    ) -> None:
        self._entity_type = entity_type
        self._limit = config.log.message_bytes_max
        self._ahead_hours = config.log.occurred_ahead_hours
        self._answer_ttl_s = max(1, int(config.api.idempotency_keep_hours * 3600))
        self._owned = database is None
        self._database = database or Database(config)
        self._sql = Statements(self._database.keyspace, entity_type.name)
        self._index = IndexStatements(self._database.keyspace)
        self._partitions = Partitions(self._database, entity_type.name, entity_type.schema_version)

    def __enter__(self) -> CassandraStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def entity_type(self) -> EntityType:
        """The type whose entities are here."""
        return self._entity_type

    def close(self) -> None:
        """Give up the connections, if they are ours."""
        if self._owned:
            self._database.close()

    def install(self) -> None:
        """Make keyspace and tables; idempotent. Needs the right to do so."""
        install(self._database, (self._entity_type.name,))

    def get(self, key: str) -> Versioned | None:
        """The entity as committed now; ``None``: there is none, or it was deleted."""
        head = self._partitions.head(self._key(key))
        if head.state is None:
            return None
        return Versioned(self._entity_type.validate_json(head.state), head.version)

    def page(
        self, *, limit: int, cursor: str | None = None, equal: Mapping[str, Scalar] | None = None
    ) -> Page:
        """At most ``limit`` entities in the order of their tokens, which is no order of keys.

        Filters are applied here, not by the server. Cost: at most 20 reads of ``limit`` rows.
        """
        token, skip = _place(cursor)
        found = list[Versioned]()
        for _ in range(_LOOKED_MAX):
            wanted = limit - len(found)
            rows = self._database.execute(self._sql.page, [token, skip + wanted])
            for row in rows[skip:]:
                if row.after is not None and _meets(row.after, equal):
                    entity = self._entity_type.validate_json(row.after)
                    found.append(Versioned(entity, row.head_version))
            if len(rows) < skip + wanted:
                return Page(found, None)
            token = rows[-1].place
            # Keys of one token come in an order that stays: how many of them were looked at.
            skip = sum(1 for row in rows if row.place == token)
            if len(found) == limit:
                break
        return Page(found, f"{token}.{skip}")

    def put(
        self,
        entity: Entity,
        *,
        provenance: Provenance,
        expected_version: int | None = None,
        occurred_at: datetime | None = None,
        event: DomainEvent | None = None,
        force: bool = False,
        once: Once | None = None,
    ) -> Written:
        """Create or update an entity; see :meth:`Store.put`. ``force`` writes an equal state too.

        Cost: a read, an insert, and a conditional write, which is four rounds between replicas.
        """
        moment = occurred_at or datetime.now(UTC)
        prepared = prepare(
            self._entity_type,
            [entity],
            provenance=provenance,
            occurred_at=moment,
            event=event,
            ahead_hours=self._ahead_hours,
        )
        row = next(iter(prepared))
        return self._write(row, expected_version, force, once)

    def delete(
        self,
        key: str,
        *,
        provenance: Provenance,
        expected_version: int | None = None,
        occurred_at: datetime | None = None,
        event: DomainEvent | None = None,
        once: Once | None = None,
    ) -> Written:
        """Delete an entity; its version goes on if it is created again (C7)."""
        name = self._entity_type.name
        row = Row(
            check_key(name, key),
            None,
            new_change_id(),
            moment_text(name, key, occurred_at or datetime.now(UTC), self._ahead_hours),
            provenance_text(name, key, provenance),
            None if event is None else event_text(name, key, event),
        )
        return self._write(row, expected_version, False, once)

    def put_many(
        self,
        entities: Iterable[Entity],
        *,
        provenance: OneOrEach[Provenance],
        occurred_at: OneOrEach[datetime] | None = None,
        event: OneOrEach[DomainEvent | None] = None,
        force: bool = False,
    ) -> WrittenMany:
        """Create or update many entities; the states of one key in their order.

        Everything is checked before the first write, but Cassandra has no transaction over keys:
        after Unavailable some may be written, and the call may be repeated.
        """
        rows = prepare(
            self._entity_type,
            entities if isinstance(entities, list) else list(entities),
            provenance=provenance,
            occurred_at=datetime.now(UTC) if occurred_at is None else occurred_at,
            event=event,
            ahead_hours=self._ahead_hours,
        )
        by_key: dict[str, list[Row]] = {}
        count = 0
        for count, row in enumerate(rows, 1):  # noqa: B007
            self._check_size(row, None)
            by_key.setdefault(self._key(row.key), []).append(row)

        def write(chain: list[Row]) -> int:
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
        """What was kept, for `api.idempotency_keep_hours`, for a :class:`Once` that was done."""
        rows = self._database.execute(self._index.answered, [once_id], serial=True)
        if not rows or rows[0].answer is None:
            return None
        return Kept(rows[0].fingerprint, rows[0].answer)

    def _write(self, row: Row, expected: int | None, force: bool, once: Once | None) -> Written:
        self._key(row.key)
        if once is not None:
            return self._write_once(row, expected, once)
        head, steps = self._partitions.move(
            row.key, lambda head: self._one(head, row, expected, force)
        )
        return _written(row, head, steps)

    def _write_once(self, row: Row, expected: int | None, once: Once) -> Written:
        """Write under an id that is derived from the request, so that it can be found again.

        The id is taken first, by a conditional insert. Whoever finds it taken by the same request
        and not answered does the same work: the change's id is the same, and a partition takes it
        once. Whether it is there is asked only when it may be, and only of the versions since.
        """
        row = row._replace(change_id=uuid5(_ONCE, once.id))
        since: int | None = None

        def plan(head: Head) -> Sequence[Step]:
            nonlocal since
            if since is None:
                since, is_first = self._take(once, head)
                if is_first:
                    return self._one(head, row, expected, False)
            done = self._partitions.version_of(row.key, row.change_id, since)
            if done is not None:
                raise _DoneBefore(
                    Written(key=row.key, version=done[0], kind=done[1], change_id=row.change_id)
                )
            return self._one(head, row, expected, False)

        try:
            head, steps = self._partitions.move(row.key, plan)
        except _DoneBefore as done:
            self._answer(once, done.written)
            raise AnsweredBefore(once.id) from None
        except Unavailable:
            raise
        except EverstateError:
            # Refused: nothing was written, and nothing is remembered.
            self._conditional(self._index.drop_once, [once.id, once.fingerprint])
            raise
        written = _written(row, head, steps)
        self._answer(once, written)
        return written

    def _take(self, once: Once, head: Head) -> tuple[int, bool]:
        """After which version its change is, if it is there; and whether nobody came before.

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
        """First row of a conditional statement that may be repeated without harm."""
        return self._database.execute(statement, values)[0]

    def _one(self, head: Head, row: Row, expected: int | None, force: bool) -> Sequence[Step]:
        name, before = self._entity_type.name, head.state
        free = expected == 0 and before is None
        if expected is not None and expected != head.version and not free:
            raise VersionConflict(name, row.key, expected, head.version)
        if before is None and row.state is None:
            raise NotFound(f"{name} {row.key!r} does not exist; there is nothing to delete.")
        return self._chain(head, [row], force)

    def _chain(self, head: Head, rows: Sequence[Row], force: bool) -> Sequence[Step]:
        """Steps for states of one key, each on the one before; equal ones are left out."""
        steps, before, version = list[Step](), head.state, head.version
        for row in rows:
            if before == row.state and not force:
                continue
            self._check_size(row, before)
            kind = Kind.CREATED if before is None else Kind.UPDATED
            version += 1
            steps.append(Step(version, Kind.DELETED if row.state is None else kind, row, before))
            before = row.state
        return steps

    def _check_size(self, row: Row, before: str | None) -> None:
        """Refuse a change that no message could hold."""
        size = max(_bytes(before), _bytes(row.state)) + _bytes(row.provenance) + _bytes(row.event)
        size += ENVELOPE_BYTES + KEY_FACTOR * _bytes(row.key)
        if size > self._limit:
            raise ChangeTooLarge(self._entity_type.name, row.key, size, self._limit)

    def _key(self, key: str) -> str:
        check_key(self._entity_type.name, key)
        if _bytes(key) > _KEY_BYTES_MAX:
            raise ChangeTooLarge(self._entity_type.name, key[:40], _bytes(key), _KEY_BYTES_MAX)
        return key


def _parts(chain: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """A key's rows in parts that a mutation of the server takes."""
    size, start = 0, 0
    for at, row in enumerate(chain):
        size += _bytes(row.state) + ENVELOPE_BYTES
        if size > _PART_BYTES_MAX and at > start:
            yield chain[start:at]
            start, size = at, _bytes(row.state) + ENVELOPE_BYTES
    yield chain[start:]


class _DoneBefore(Exception):
    """The change of this request is there already."""

    def __init__(self, written: Written) -> None:
        self.written = written
        super().__init__(written.key)


def _written(row: Row, head: Head, steps: Sequence[Step]) -> Written:
    if not steps:
        return Written(key=row.key, version=head.version)
    step = steps[-1]
    return Written(key=row.key, version=step.version, kind=step.kind, change_id=step.row.change_id)


def _meets(state: str, equal: Mapping[str, Scalar] | None) -> bool:
    if not equal:
        return True
    fields = json.loads(state)
    return all(
        name in fields
        and fields[name] == value
        and isinstance(fields[name], bool) == isinstance(value, bool)
        for name, value in equal.items()
    )


def _place(cursor: str | None) -> tuple[int, int]:
    """The token at which a page begins, and how many keys of that token were looked at."""
    if cursor is None:
        return TOKEN_MIN, 0
    told = _CURSOR.fullmatch(cursor)
    if told is None or not TOKEN_MIN <= int(told[1]) <= TOKEN_MAX:
        raise InvalidQuery("cursor: expected the cursor of an earlier page.")
    return int(told[1]), int(told[2])


def _bytes(text: str | None) -> int:
    return 0 if text is None else len(text.encode())
