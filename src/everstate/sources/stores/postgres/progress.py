"""How far the import of a file has come: kept in the store, so that it goes on after a crash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from pathlib import Path

from everstate.errors import ImportFailed
from everstate.sources.stores.postgres.database import OutboxConnection
from everstate.sources.stores.postgres.schema import install
from everstate.sources.stores.postgres.statements import ADVANCE, FINISH, PROGRESS
from everstate.sources.stores.postgres.store import EntityStore


class ImportProgress:
    """The first row of a file that no import of it has committed.

    ``import_id``: see :func:`import_id`.
    """

    def __init__(self, store: EntityStore, path: Path, import_id: str, first_row: int) -> None:
        self._store, self._path, self._id = store, path, import_id
        with store.transaction() as connection:
            install(connection, [store.entity_type], answers=True, imports=True)
            found = connection.execute(PROGRESS, [import_id]).fetchone()
        self.is_resumed = found is not None
        next_row, rows = found or (first_row, 0)
        self.next_row = int(next_row)
        self.rows = int(rows)
        """How many rows are committed, in all runs of the import."""

    def advance(self, next_row: int, rows: int) -> Callable[[OutboxConnection], None]:
        """What the transaction that commits ``rows`` rows before ``next_row`` does as well."""
        values = {
            "id": self._id,
            "entity": self._store.entity_type.name,
            "from_row": self.next_row,
            "next_row": next_row,
            "rows": self.rows + rows,
        }

        def advance_in(connection: OutboxConnection) -> None:
            if connection.execute(ADVANCE, values).rowcount != 1:
                raise ImportFailed(
                    str(self._path),
                    None,
                    "another import of it is running",
                    advice="Wait for its end. If it does not come to one, import the file again.",
                )

        return advance_in

    def advanced(self, next_row: int, rows: int) -> None:
        """The transaction was committed."""
        self.next_row, self.rows = next_row, self.rows + rows

    def finish(self) -> None:
        """Forget all imports of the file: this one has come to its end."""
        with self._store.transaction() as connection:
            connection.execute(FINISH, [self._id.partition(":")[0]])


def import_id(
    entity: str, path: Path, first_row: int | None, ignored: Collection[str], missing: str
) -> str:
    """Id of an import: equal for the same content, entity type and options; first the content's.

    Cost: reads the file.
    """
    try:
        with path.open("rb") as content:
            digest = hashlib.file_digest(content, "blake2b").hexdigest()
    except OSError as cause:
        raise ImportFailed(str(path), None, cause.strerror or str(cause)) from cause
    options = [first_row, sorted(ignored), missing]
    return ":".join(_digest(said) for said in ([entity, path.suffix.lower(), digest], options))


def _digest(said: object) -> str:
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()
