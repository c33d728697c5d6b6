"""The registry of versions of views: their meanings, their states, and which one readers see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Final, TypedDict, Unpack
from uuid import UUID

from psycopg.types.json import Jsonb

from everstate.views.control.schema import Schema
from everstate.views.tables import HOME

LIVE: Final = "live"
"""The version is kept, and readers see it."""
BUILDING: Final = "building"
"""The version is built or catches up, and is published when it has caught up with the core."""
WAITING: Final = "waiting"
"""The version is built when an operator requests it, or waits because it was refused."""
KEPT: Final = "kept"
"""Another version replaced it; it is not updated, and is there for `views rebuild --undo`."""
RETIRED: Final = "retired"
"""No app declares it; readers still see it, but it is not updated."""
DROPPED: Final = "dropped"
"""Nobody reads it; its rows are in another store, and are deleted there when that store answers."""
_LEFT: Final = (
    "its rows are deleted while `everstate run` runs; if their store is gone for good, "
    "`everstate views drop {} --forget` forgets them"
)


@dataclass(frozen=True, slots=True)
class ViewVersion:
    """One version of a view.

    Four fields say how it is, each with one writer. ``status_reason``, by whoever sets the status:
    why it waits or was retired. ``error``, by what moves its position: why the last try failed.
    ``waits_for``, by the publisher: why a built version is not published yet, or why readers do not
    see one in another store any more. ``progress``, by the
    builder and then by what lets it catch up: ``doing``, ``share``, ``rate``, ``left_s``.

    ``built``, once it is built: the vector that it was built up to (`generation/partition` → next
    offset), the number of changes and the seconds. For a view over other views: its tables and
    positions, as of the last refresh.
    """

    name: str
    version: int
    entity: str
    kind: str
    """Its kind of view, see :mod:`everstate.views.kinds`."""
    definition: Mapping[str, Any]
    fields: Sequence[str]
    """Fields of the entity that its SQL names."""
    fingerprint: str
    status: str = LIVE
    status_reason: str | None = None
    error: str | None = None
    waits_for: str | None = None
    progress: Mapping[str, Any] | None = None
    built: Mapping[str, Any] | None = None
    published: bool = False
    published_at: datetime | None = None
    """When it was last published."""
    options: Mapping[str, Any] | None = None
    """Options of publishing it: `force`, `require_equal`."""
    changed_at: datetime | None = None
    verified_at: datetime | None = None
    verified: Mapping[str, Any] | None = None
    undone: str | None = None
    """The fingerprint from which an operator went back to this version: as long as the app declares
    that meaning, this version stays."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the views that it reads; empty: it reads changes, and has its own table."""
        return tuple(self.definition.get("inputs", ()))

    @property
    def store(self) -> str:
        """Name of the store in which its rows are."""
        return str(self.definition.get("store", HOME))

    @property
    def attempt(self) -> str:
        """The attempt that filled its table in another store, as in the table's name."""
        return str((self.built or {}).get("attempt", ""))

    @property
    def is_part(self) -> bool:
        """Whether it was not declared: it is an input of another view."""
        return bool(self.definition.get("is_part"))

    @property
    def is_topic(self) -> bool:
        """Whether it is a derived topic, which has no table."""
        return "derives" in self.definition

    @property
    def shown(self) -> str:
        """Its state in one word: its status, or `behind` for a live view that failed or trails."""
        is_behind = self.error is not None or self.progress is not None
        return "behind" if self.status == LIVE and is_behind else self.status

    @property
    def why(self) -> str | None:
        """Its error, what it waits for and the reason of its status; ``None``: it has none."""
        return reasons_text(self.error, self.waits_for, self.status_reason)


_COLUMNS: Final = ", ".join(field.name for field in fields(ViewVersion))


def reasons_text(*reasons: str | None) -> str | None:
    """The reasons that there are, one after the other; ``None``: there is none."""
    return "; ".join(each for each in reasons if each is not None) or None


class VersionFacts(TypedDict, total=False):
    """Facts of a version that change by themselves; see `ViewVersion`."""

    error: str | None
    waits_for: str | None
    progress: Mapping[str, Any] | None
    built: Mapping[str, Any] | None
    options: Mapping[str, Any]
    undone: str
    met_at: None
    """That it caught up with the core; see :meth:`Registry.caught_up`."""


class Registry(Schema):
    """The table of versions."""

    def versions(self, name: str | None = None, entity: str | None = None) -> list[ViewVersion]:
        """Versions by name and number: all, of one view, or of one entity type."""
        rows = self.run(
            "SELECT " + _COLUMNS + " FROM {view} WHERE (%(name)s::text IS NULL OR name = %(name)s) "
            "AND (%(entity)s::text IS NULL OR entity = %(entity)s) ORDER BY name, version",
            {"name": name, "entity": entity},
        )
        return [ViewVersion(*row) for row in rows]

    def readable(self, names: Sequence[str]) -> set[str]:
        """Which of these names of views readers find in the schema."""
        rows = self.run(
            "SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace(quote_ident(%s)) "
            "AND relkind = 'v' AND relname = ANY(%s)",
            (self.schema_name, list(names)),
        )
        return {name for (name,) in rows}

    def add_version(self, row: ViewVersion) -> None:
        """Register a version of a view; one that is registered gets the status and its reason."""
        self.run(
            "INSERT INTO {view_number} AS known (name, version) VALUES (%s, %s) "
            "ON CONFLICT (name) "
            "DO UPDATE SET version = greatest(known.version, excluded.version)",
            (row.name, row.version),
        )
        self.run(
            "INSERT INTO {view} (name, version, entity, kind, definition, fields, fingerprint, "
            "status, status_reason, built, published) "
            "VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING",
            (
                *(row.name, row.version, row.entity, row.kind, Jsonb(dict(row.definition))),
                *(list(row.fields), row.fingerprint, row.status, row.status_reason),
                *(_stored(row.built), row.published),
            ),
        )
        self.set_status(row.name, row.version, row.status, row.status_reason)

    def numbers(self) -> dict[str, int]:
        """The highest version of each name, also of versions and views that were dropped.

        A number is never used twice: held changes and running tasks know a version by it.
        """
        return dict(self.run("SELECT name, version FROM {view_number}").fetchall())

    def set_status(self, name: str, version: int, status: str, reason: str | None = None) -> None:
        """Set the status of a version, and the reason of that status.

        A new status clears its error, what it waits for, its progress, and the record that it
        caught up with the core.
        """
        self.run(
            "UPDATE {view} SET status = %s, status_reason = %s, error = NULL, waits_for = NULL, "
            "progress = NULL, changed_at = now(), met_at = NULL WHERE name = %s AND version = %s "
            "AND (status, status_reason) IS DISTINCT FROM (%s, %s)",
            (status, reason, name, version, status, reason),
        )

    def record(self, name: str, version: int, **facts: Unpack[VersionFacts]) -> None:
        """Store facts of a version, in one statement; what is stored already is not written."""
        values = [_stored(v) if isinstance(v, Mapping) else v for v in facts.values()]
        changed = [f"{column} = %s" for column in facts]
        if not facts.keys().isdisjoint(("error", "waits_for")):
            changed.append("changed_at = now()")
        self.run(
            f"UPDATE {{view}} SET {', '.join(changed)} WHERE name = %s AND version = %s "
            f"AND ({', '.join(facts)}) IS DISTINCT FROM ({', '.join(['%s'] * len(facts))})",
            (*values, name, version, *values),
        )

    def set_verified(self, name: str, version: int, report: Mapping[str, Any]) -> None:
        """Store the outcome of a proof, with the database's time."""
        self.run(
            "UPDATE {view} SET verified_at = now(), verified = %s WHERE name = %s AND version = %s",
            (_stored(report), name, version),
        )

    def declared(self, row: ViewVersion) -> None:
        """Store the text with which an app declares a version, and end an undo that led to it.

        Nothing where the version has another meaning.
        """
        text = (row.kind, Jsonb(dict(row.definition)), list(row.fields))
        self.run(
            "UPDATE {view} SET kind = %s, definition = %s, fields = %s, undone = NULL "
            "WHERE name = %s AND version = %s AND fingerprint = %s",
            (*text, row.name, row.version, row.fingerprint),
        )

    def begin_build(self, name: str, version: int) -> UUID | None:
        """Begin a build; returns the attempt's id.

        ``None``: it is not wanted any more, it is built already, or readers see it.

        Tasks of an earlier attempt, which may still run, write nothing from here on.
        """
        attempt: UUID | None = self.value(
            "UPDATE {view} SET attempt = gen_random_uuid(), progress = NULL WHERE name = %s "
            "AND version = %s AND status = %s AND built IS NULL AND NOT published "
            "RETURNING attempt",
            (name, version, BUILDING),
        )
        return attempt

    def is_emptied(self, name: str, version: int) -> bool:
        """Whether a build was begun and did not end, so that the table lacks rows."""
        query = "SELECT attempt IS NOT NULL FROM {view} WHERE name = %s AND version = %s"
        return bool(self.value(query, (name, version)))

    def add_table(self, name: str, version: int, store: str, attempt: str) -> None:
        """Record that an attempt has a table in another store, before it is created there."""
        query = "INSERT INTO {stored_table} (view, version, store, attempt) VALUES (%s, %s, %s, %s)"
        self.run(query + " ON CONFLICT DO NOTHING", (name, version, store, attempt))

    def left_tables(self) -> list[tuple[str, int, str, str]]:
        """View, version, store and attempt of each table elsewhere that nobody needs any more.

        Also of a version that a release without other stores removed from the registry.
        """
        rows = self.run(
            "SELECT made.view, made.version, made.store, made.attempt FROM {stored_table} AS made "
            "LEFT JOIN {view} AS row ON (row.name, row.version) = (made.view, made.version) "
            "WHERE row.name IS NULL OR row.status = %s "
            "OR (made.attempt IS DISTINCT FROM row.built->>'attempt' "
            "AND made.attempt IS DISTINCT FROM left(row.attempt::text, 8)) ORDER BY 1, 2, 4",
            (DROPPED,),
        )
        return rows.fetchall()

    def remove_table(self, name: str, version: int, attempt: str) -> None:
        """Forget a table in another store, which was dropped there."""
        query = "DELETE FROM {stored_table} WHERE view = %s AND version = %s AND attempt = %s"
        self.run(query, (name, version, attempt))

    def remove_dropped(self) -> None:
        """Delete the rows of dropped versions that have no table in another store any more."""
        self.run(
            "DELETE FROM {view} AS row WHERE status = %s AND NOT published "
            "AND NOT EXISTS (SELECT FROM {stored_table} AS made "
            "WHERE (made.view, made.version) = (row.name, row.version))",
            (DROPPED,),
        )

    def is_attempt(self, name: str, version: int, attempt: UUID) -> bool:
        """Whether this attempt is still the current build; it stays so in this transaction."""
        return self.run_one(
            "SELECT FROM {view} WHERE name = %s AND version = %s AND attempt = %s FOR SHARE",
            (name, version, attempt),
        )

    def end_build(self, name: str, version: int, attempt: UUID, built: Mapping[str, Any]) -> bool:
        """Store the result of a build; false when the attempt is not the current one any more."""
        return self.run_one(
            "UPDATE {view} SET built = %s, attempt = NULL, progress = NULL, error = NULL "
            "WHERE name = %s AND version = %s AND attempt = %s",
            (_stored(built), name, version, attempt),
        )

    def add_built(self, name: str, version: int, more: Mapping[str, Any]) -> None:
        """Add to the result of a build, which another thread may replace meanwhile."""
        self.run(
            "UPDATE {view} SET built = coalesce(built, '{{}}') || %s "
            "WHERE name = %s AND version = %s",
            (_stored(more), name, version),
        )

    def mark_unrefreshed(self, name: str, version: int) -> bool:
        """Record that the sums of a join are not refreshed any more: the next refresh is full.

        False: the version is live or built again, which another process may have asked for.
        """
        return self.run_one(
            "UPDATE {view} SET built = built - 'tables' WHERE name = %s AND version = %s "
            "AND status <> ALL(%s)",
            (name, version, [LIVE, BUILDING]),
        )

    def caught_up(self, name: str, version: int) -> str | None:
        """Record once when a version caught up; returns a reader with an older snapshot, or none.

        Once the name points to the new version, that reader would see an empty table under it
        (V13).
        """
        met_at = self.value(
            "UPDATE {view} SET met_at = coalesce(met_at, pg_current_xact_id()) "
            "WHERE name = %s AND version = %s RETURNING met_at::text",
            (name, version),
        )
        reader: str | None = self.value(
            "SELECT format('%%s (process %%s)', "
            "coalesce(nullif(application_name, ''), usename, '?'), pid) "
            "FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid() AND backend_xmin IS NOT NULL "
            "AND age(backend_xmin) > age(%s::xid8::xid) ORDER BY xact_start LIMIT 1",
            (met_at,),
        )
        return reader

    def swap_published(self, name: str, old: int | None, new: int) -> bool:
        """Compare and swap the published version; returns whether it was ``old``.

        False, too, when the new one is not to be published any more; the caller rolls back.
        """
        if old is not None:
            replaced = self.run(
                "UPDATE {view} SET published = false, status = %s, status_reason = NULL, "
                "error = NULL, waits_for = NULL, progress = NULL, met_at = NULL, undone = NULL, "
                "changed_at = now() WHERE name = %s AND version = %s AND published",
                (KEPT, name, old),
            )
            if replaced.rowcount != 1:
                return False
        elif any(row.published for row in self.versions(name)):
            return False
        return self.run_one(
            "UPDATE {view} SET published = true, status = %s, status_reason = NULL, error = NULL, "
            "waits_for = NULL, progress = NULL, changed_at = now(), published_at = now(), "
            "options = NULL WHERE name = %s AND version = %s "
            "AND (status = %s OR definition ? 'derives')",
            (LIVE, name, new, BUILDING),
        )

    def remove_version(self, name: str, version: int) -> bool:
        """Delete a version's row; the caller removes its table and positions.

        False, and nothing is deleted, while readers see the version.
        """
        query = "DELETE FROM {view} WHERE name = %s AND version = %s AND NOT published"
        return self.run_one(query, (name, version))

    def leave_to_store(self, name: str, version: int) -> bool:
        """Let the rows of a version in another store be deleted later; false: it has none there.

        A build of it that runs anywhere ends.
        """
        return self.run_one(
            "UPDATE {view} SET status = %s, status_reason = %s, attempt = NULL, "
            "changed_at = now() "
            "WHERE name = %s AND version = %s AND definition ? 'store' AND NOT published",
            (DROPPED, _LEFT.format(name), name, version),
        )

    def forget_left(self, name: str) -> list[tuple[str, int, str | None]]:
        """Forget the dropped versions of a view, whose rows stay in other stores.

        Store, version and attempt of each of their tables; no attempt where no table was left. Also
        of tables whose version a release without other stores removed from the registry.
        """
        rows = self.run(
            "WITH gone AS (DELETE FROM {view} WHERE name = %(name)s AND status = %(dropped)s "
            "RETURNING version, definition->>'store' AS store), "
            "tables AS (DELETE FROM {stored_table} AS made WHERE view = %(name)s "
            "AND NOT EXISTS (SELECT FROM {view} AS row WHERE (row.name, row.version) "
            "= (made.view, made.version) AND row.status <> %(dropped)s) "
            "RETURNING version, store, attempt) "
            "SELECT coalesce(tables.store, gone.store), version, tables.attempt "
            "FROM gone FULL JOIN tables USING (version) ORDER BY 2, 3",
            {"name": name, "dropped": DROPPED},
        )
        return rows.fetchall()

    def withdraw(self, name: str) -> None:
        """Record that readers see no version of a view: its name was dropped."""
        self.run("UPDATE {view} SET published = false WHERE name = %s AND published", (name,))

    def model(self, entity: str) -> Mapping[str, Any] | None:
        """The stored model of an entity type; ``None``: there is none yet."""
        query = "SELECT model FROM {entity_model} WHERE entity = %s"
        model: Mapping[str, Any] | None = self.value(query, (entity,))
        return model

    def set_model(self, entity: str, model: Mapping[str, Any]) -> None:
        """Store an entity type's model."""
        self.run(
            "INSERT INTO {entity_model} AS recorded (entity, model) VALUES (%s, %s) "
            "ON CONFLICT (entity) DO UPDATE SET model = excluded.model, noted_at = now() "
            "WHERE recorded.model IS DISTINCT FROM excluded.model",
            (entity, _stored(model)),
        )

    def begin_deployment(self, project: str, host: str) -> int:
        """Register a start of a project; returns its number: later starts have higher ones."""
        number: int = self.value(
            "INSERT INTO {deployment} (project, started_on) VALUES (%s, %s) RETURNING number",
            (project, host),
        )
        return number

    def later_deployment(self, number: int, entity: str) -> str | None:
        """The last deployment after this one that decides about an entity type's views, as text.

        It is one that has declared views: of this project any, which may have left the entity type
        out, and of another project those of the entity type.
        """
        later: str | None = self.value(
            "SELECT project || ' on ' || started_on || ', started ' || "
            "to_char(started_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') || ' UTC' "
            "FROM {deployment} WHERE number > %s AND declared <> '{{}}' "
            "AND (declared @> ARRAY[%s::text] "
            "OR project = (SELECT project FROM {deployment} WHERE number = %s)) "
            "ORDER BY number DESC LIMIT 1",
            (number, entity, number),
        )
        return later

    def left_entities(self, number: int, declared: Sequence[str]) -> list[str]:
        """Entity types of this project's earlier starts that it does not declare any more.

        Those that another project declares, too, are left out.
        """
        rows = self.run(
            "SELECT DISTINCT entity FROM {deployment} AS mine "
            "JOIN {deployment} AS past USING (project), "
            "unnest(past.declared) AS entity WHERE mine.number = %s AND past.number < %s "
            "AND entity <> ALL(%s) AND NOT EXISTS (SELECT FROM {deployment} AS other "
            "WHERE other.project <> mine.project AND other.declared @> ARRAY[entity]) ORDER BY 1",
            (number, number, list(declared)),
        )
        return [entity for (entity,) in rows]

    def declares(self, number: int, entity: str) -> bool:
        """Record that a deployment declares an entity type's views; false: it did so before."""
        return self.run_one(
            "UPDATE {deployment} SET declared = declared || %s::text "
            "WHERE number = %s AND NOT declared @> ARRAY[%s::text]",
            (entity, number, entity),
        )

    def unused(self, hours: float) -> list[ViewVersion]:
        """Versions that were replaced, or not declared any more, more than so many hours ago.

        A version from which an operator went back is left out: the app still declares it.
        """
        rows = self.run(
            "SELECT " + _COLUMNS + " FROM {view} AS this WHERE status = ANY(%s) "
            "AND changed_at < now() - make_interval(secs => %s) AND NOT EXISTS (SELECT FROM {view} "
            "AS seen WHERE seen.name = this.name AND seen.undone = this.fingerprint) "
            "ORDER BY name, version",
            ([KEPT, RETIRED], hours * 3600),
        )
        return [ViewVersion(*row) for row in rows]


def _stored(value: Mapping[str, Any] | None) -> Jsonb | None:
    """A mapping as PostgreSQL stores it."""
    return None if value is None else Jsonb(dict(value))
