"""The store `redis`: a hash for each row, and a key that names the version for readers.

Keys of a view whose second version is published, in the schema `everstate_views`: the text
``everstate_views:NAME`` is the beginning of the keys of its rows, such as
``everstate_views:NAME__v2_5f2b7c1e:``; the last part names the attempt that built it. After it
comes the row's key. A deleted row has no hash; its version is kept at
``everstate_views:NAME__v2_5f2b7c1e~`` and its key for a week, so that no older write brings it
back. The key ``everstate_views:NAME__v2_5f2b7c1e`` says that the table is there: a Redis that was
emptied does not have it, and takes no rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, ClassVar, Final

import pyarrow as pa
import pyarrow.types as types
from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from everstate.config import Config
from everstate.errors import InvalidView, ViewRowsMissing
from everstate.sections import ViewServerConfig
from everstate.views.stores.postgres.types import check_range
from everstate.views.tables import KeptTable, Merge

_PIECE: Final = 500
"""Keys that are read or deleted together."""
_CALL_ROWS: Final = 200
_CALL_CHARACTERS: Final = 4_000_000
"""Most rows, and about the most text, that one script writes: the server does nothing else then."""
_DELETED_S: Final = 7 * 24 * 3600
"""How long the version of a deleted row is kept: longer than a task of the pipeline may live."""
_WAIT_S: Final = 30.0
_TEXT: Final = pa.string()
_MISSING: Final = -1
"""What a script returns for a table that is not there."""
_WRITE: Final = """\
if redis.call('EXISTS', KEYS[1]) == 0 then return -1 end
local at = 1
while at <= #ARGV do
  local row, deleted = KEYS[1] .. ':' .. ARGV[at], KEYS[1] .. '~' .. ARGV[at]
  local new, seconds, last = ARGV[at + 1], ARGV[at + 2], at + 3 + ARGV[at + 3]
  local old = redis.call('HGET', row, '_version') or redis.call('GET', deleted)
  -- Compared as texts: a number of Lua has 53 bits.
  if not old or #old < #new or (#old == #new and old < new) then
    if seconds ~= '' then
      redis.call('DEL', row)
      redis.call('SET', deleted, new, 'EX', seconds)
    else
      if old then
        -- A full server refuses the first write of a script, and none after it.
        redis.call('HSET', row, '_version', new)
        redis.call('DEL', row, deleted)
      end
      redis.call('HSET', row, '_version', new, unpack(ARGV, at + 4, last))
    end
  end
  at = last + 1
end
return 1
"""
"""Write rows and deletions over lower versions, to a table that is there.

KEYS: the table. ARGV, for each row: place, version, seconds of a deletion, number of the texts that
follow, and these: names of fields and values.
"""
_PUBLISH: Final = """\
if redis.call('EXISTS', KEYS[2]) == 0 then return -1 end
redis.call('SET', KEYS[1], KEYS[2] .. ':')
return 1
"""
_KEPT: Final = (
    *(types.is_string, types.is_integer, types.is_floating, types.is_decimal),
    *(types.is_boolean, types.is_date32, types.is_timestamp),
)
"""Types whose texts are read back as the same values."""


class RedisStore:
    """Views in Redis 6 or newer: one server, or a primary with replicas, but not Redis Cluster."""

    merges: ClassVar[frozenset[Merge]] = frozenset({"row", "append"})
    call_s_max: ClassVar[float] = 300.0

    def __init__(self, config: Config) -> None:
        self._server = config.stores.server("redis")
        self._schema = config.views.schema_name

    def install(self, table: KeptTable, schema: pa.Schema) -> None:
        """Check the server and the types, and set the key of the table."""
        for field in schema:
            if not any(is_of(field.type) for is_of in _KEPT):
                raise InvalidView(
                    table.view,
                    f"Redis keeps plain values, and its column {field.name!r} is {field.type}.",
                    advice="Select parts of that value, or leave the store out.",
                )
        memory = self._client().info("memory")
        policy = memory.get("maxmemory_policy", "noeviction")
        if memory.get("maxmemory") and policy != "noeviction":
            raise InvalidView(
                table.view,
                f"Redis would delete rows when it is full: its maxmemory-policy is {policy}.",
                advice="Set maxmemory-policy to noeviction, or use a Redis of its own for views.",
            )
        self._client().set(self._prefix(table.name), 1)

    def write(self, table: KeptTable, rows: pa.Table, gone: pa.Table) -> None:
        """Write rows and deletions over lower versions, some hundred with each request."""
        fields, given = rows.column_names[2:], []
        for key, version, *values in zip(*map(_texts, rows.columns), strict=True):
            shown = [p for p in zip(fields, values, strict=True) if p[1] is not None]
            texts = (2 * len(shown), *chain.from_iterable(shown))
            given.append((_place(table.merge, key, version), version, "", *texts))
        for key, version in zip(*map(_texts, gone.columns), strict=True):
            given.append((_place(table.merge, key, version), version, _DELETED_S, 0))
        name, script = self._prefix(table.name), self._client().register_script(_WRITE)
        for some in _calls(given):
            if script(keys=(name,), args=[*chain.from_iterable(some)]) == _MISSING:
                raise ViewRowsMissing(table.view, name)

    def rows(self, table: KeptTable, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """All rows, some hundred a batch, each once; their keys are in memory until the end.

        The key of the table is asked for last: :meth:`drop` deletes it before any row.
        """
        client, start, seen = self._client(), self._prefix(table.name), set[str]()
        for places in self._scanned(f"{start}:*"):
            new = [place for place in dict.fromkeys(places) if place not in seen]
            seen.update(new)
            with client.pipeline(transaction=False) as pipe:
                for place in new:
                    pipe.hgetall(place)
                found = [
                    (place, row) for place, row in zip(new, pipe.execute(), strict=True) if row
                ]
            for place, row in found:
                key = place[len(start) + 1 :]
                row["_key"] = key if table.merge == "row" else key.rpartition(":")[0]
            texts = [pa.array([row.get(name) for _, row in found], _TEXT) for name in schema.names]
            columns = [text.cast(field.type) for text, field in zip(texts, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)
        if not client.exists(start):
            raise ViewRowsMissing(table.view, start)

    def drop(self, name: str) -> None:
        """Delete the key of a table, then rows and versions of deleted ones, in many requests."""
        self._client().delete(self._prefix(name))
        for places in self._scanned(f"{self._prefix(name)}[:~]*"):
            self._client().unlink(*places)

    def publish(self, view: str, name: str) -> None:
        """Let readers of a view find the rows of a table."""
        table = self._prefix(name)
        if self._client().eval(_PUBLISH, 2, self._prefix(view), table) == _MISSING:
            raise ViewRowsMissing(view, table)

    def unpublish(self, view: str) -> None:
        """Let readers find nothing under the name of a view."""
        self._client().delete(self._prefix(view))

    def _prefix(self, name: str) -> str:
        return f"{self._schema}:{name}"

    def _scanned(self, pattern: str) -> Iterator[Sequence[str]]:
        """Keys of a pattern, some hundred at a time; one may come twice."""
        cursor = 0
        while True:
            cursor, places = self._client().scan(cursor, pattern, _PIECE)
            if places:
                yield [str(place) for place in places]
            if cursor == 0:
                return

    def _client(self) -> Redis:
        return _connected(self._server)


@lru_cache
def _connected(server: ViewServerConfig) -> Redis:
    """The client of this process; its threads and calls share connections."""
    if not server.url:
        raise ConnectionError(
            "stores.redis.url is not set, and no local Redis was started; add [stores.redis] to "
            "everstate.toml and run `everstate up`"
        )
    secret = server.password.get_secret_value() if server.password else None
    trusted = {"ssl_ca_certs": str(server.ssl_cafile)} if server.ssl_cafile else {}
    # One retry, for a connection that the server closed; the pipeline itself tries again later.
    try:
        return Redis.from_url(
            server.url,
            username=server.user,
            password=secret,
            decode_responses=True,
            retry=Retry(NoBackoff(), 1),
            socket_timeout=_WAIT_S,
            socket_connect_timeout=_WAIT_S,
            **trusted,
        )
    except ValueError:
        # Its message may show a part of a password.
        raise ConnectionError(
            "stores.redis.url is not of the form redis://host:port/database, or rediss://…"
        ) from None


def _place(merge: Merge, key: str, version: str) -> str:
    """What follows the name of the table in the keys of a row and of its deletion."""
    return key if merge == "row" else f"{key}:{version}"


def _calls(given: Sequence[Sequence[Any]]) -> Iterator[Sequence[Sequence[Any]]]:
    """The arguments of rows in parts, of which a script writes one."""
    start = characters = 0
    for end, row in enumerate(given):
        size = sum(len(text) for text in row if isinstance(text, str))
        if end - start == _CALL_ROWS or (end > start and characters + size > _CALL_CHARACTERS):
            yield given[start:end]
            start, characters = end, 0
        characters += size
    if given:
        yield given[start:]


def _texts(values: pa.ChunkedArray) -> list[str | None]:
    """Values as texts; raises ArrowInvalid for a time that Python does not have."""
    check_range(values)
    found: list[str | None] = values.cast(_TEXT).to_pylist()
    return found
