"""The registry of versions of views: their meanings, their states, and which one readers see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from psycopg import sql
from psycopg.types.json import Jsonb

from everstate.views.control.schema import Schema

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

_COLUMNS: Final = (
    "name, version, entity, kind, definition, fields, fingerprint, status, status_reason, error, "
    "waits_for, progress, built, published, published_at, options, changed_at, verified_at, "
    "verified, undone"
)


@dataclass(frozen=True, slots=True)
class ViewVersion:
    """One version of a view.

    Four fields say how it is, each with one writer. ``status_reason``, by whoever sets the status:
    why it waits or was retired. ``error``, by what moves its position: why the last try failed.
    ``waits_for``, by the publisher: why a built version is not published yet. ``progress``, by the
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


def reasons_text(*reasons: str | None) -> str | None:
    """The reasons that there are, one after the other; ``None``: there is none."""
    return "; ".join(each for each in reasons if each is not None) or None


class Registry(Schema):
    """The table of versions."""

    def versions(self, name: str | None = None, entity: str | None = None) -> list[ViewVersion]:
        """Versions by name and number: all, of one view, or of one entity type."""
        query = sql.SQL(
            "SELECT " + _COLUMNS + " FROM {} WHERE (%(name)s::text IS NULL OR name = %(name)s) "
            "AND (%(entity)s::text IS NULL OR entity = %(entity)s) ORDER BY name, version"
        ).format(self.table("view"))
        rows = self.connection.execute(query, {"name": name, "entity": entity})
        return [ViewVersion(*row) for row in rows]

    def readable(self, names: Sequence[str]) -> set[str]:
        """Which of these names of views readers find in the schema."""
        query = (
            "SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace(%s) "
            "AND relkind = 'v' AND relname = ANY(%s)"
        )
        values = (sql.Identifier(self.schema_name).as_string(self.connection), list(names))
        return {name for (name,) in self.connection.execute(query, values)}

    def add_version(self, row: ViewVersion) -> None:
        """Register a version of a view; an existing one is not changed."""
        number = sql.SQL(
            "INSERT INTO {} AS known (name, version) VALUES (%s, %s) ON CONFLICT (name) "
            "DO UPDATE SET version = greatest(known.version, excluded.version)"
        )
        self.connection.execute(number.format(self.table("view_number")), (row.name, row.version))
        query = sql.SQL(
            "INSERT INTO {} (name, version, entity, kind, definition, fields, fingerprint, status, "
            "status_reason, built, published) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s) "
            "ON CONFLICT DO NOTHING"
        ).format(self.table("view"))
        self.connection.execute(
            query,
            (
                *(row.name, row.version, row.entity, row.kind, Jsonb(dict(row.definition))),
                *(list(row.fields), row.fingerprint, row.status, row.status_reason),
                *(None if row.built is None else Jsonb(dict(row.built)), row.published),
            ),
        )

    def numbers(self) -> dict[str, int]:
        """The highest version of each name, also of versions and views that were dropped.

        A number is never used twice: held changes and running tasks know a version by it.
        """
        rows = self.connection.execute(
            sql.SQL("SELECT name, version FROM {}").format(self.table("view_number"))
        )
        return dict(rows.fetchall())

    def set_status(self, name: str, version: int, status: str, reason: str | None = None) -> None:
        """Set the status of a version, and the reason of that status.

        A new status clears its error, what it waits for, its progress, and the record that it
        caught up with the core.
        """
        query = sql.SQL(
            "UPDATE {} SET status = %s, status_reason = %s, error = NULL, waits_for = NULL, "
            "progress = NULL, changed_at = now(), met_at = NULL WHERE name = %s AND version = %s "
            "AND (status, status_reason) IS DISTINCT FROM (%s, %s)"
        ).format(self.table("view"))
        self.connection.execute(query, (status, reason, name, version, status, reason))

    def set_error(self, name: str, version: int, error: str | None) -> None:
        """Store why a version's position could not be moved; ``None``: it moves again."""
        self._set(name, version, "error", error)

    def set_waits_for(self, name: str, version: int, waits_for: str | None) -> None:
        """Store why a version is not published yet, or a name keeps its former columns."""
        self._set(name, version, "waits_for", waits_for)

    def _set(self, name: str, version: int, column: str, value: str | None) -> None:
        query = sql.SQL(
            "UPDATE {table} SET {column} = %s, changed_at = now() "
            "WHERE name = %s AND version = %s AND {column} IS DISTINCT FROM %s"
        ).format(table=self.table("view"), column=sql.Identifier(column))
        self.connection.execute(query, (value, name, version, value))

    def set_definition(self, row: ViewVersion) -> None:
        """Store another text of a definition with the same meaning."""
        query = sql.SQL(
            "UPDATE {} SET kind = %s, definition = %s, fields = %s WHERE name = %s AND version = %s"
        )
        meaning = (row.kind, Jsonb(dict(row.definition)), list(row.fields))
        values = (*meaning, row.name, row.version)
        self.connection.execute(query.format(self.table("view")), values)

    def set_undone(self, name: str, version: int, fingerprint: str) -> None:
        """Record from which meaning an operator goes back to a version."""
        query = sql.SQL("UPDATE {} SET undone = %s WHERE name = %s AND version = %s")
        self.connection.execute(query.format(self.table("view")), (fingerprint, name, version))

    def end_undo(self, name: str, version: int, fingerprint: str) -> None:
        """Forget from which meaning an operator went back, once an app declares the version."""
        query = sql.SQL(
            "UPDATE {} SET undone = NULL WHERE name = %s AND version = %s AND fingerprint = %s"
        )
        values = (name, version, fingerprint)
        self.connection.execute(query.format(self.table("view")), values)

    def begin_build(self, name: str, version: int) -> UUID | None:
        """Begin a build; returns the attempt's id.

        ``None``: it is not wanted any more, or readers see it already.

        Tasks of an earlier attempt, which may still run, write nothing from here on.
        """
        query = sql.SQL(
            "UPDATE {} SET attempt = gen_random_uuid(), built = NULL, progress = NULL "
            "WHERE name = %s AND version = %s AND status = %s AND NOT published RETURNING attempt"
        ).format(self.table("view"))
        row = self.connection.execute(query, (name, version, BUILDING)).fetchone()
        return None if row is None else row[0]

    def is_attempt(self, name: str, version: int, attempt: UUID) -> bool:
        """Whether this attempt is still the current build; it stays so in this transaction."""
        query = sql.SQL(
            "SELECT FROM {} WHERE name = %s AND version = %s AND attempt = %s FOR SHARE"
        ).format(self.table("view"))
        row = self.connection.execute(query, (name, version, attempt)).fetchone()
        return row is not None

    def end_build(self, name: str, version: int, attempt: UUID, built: Mapping[str, Any]) -> bool:
        """Store the result of a build; false when the attempt is not the current one any more."""
        query = sql.SQL(
            "UPDATE {} SET built = %s, attempt = NULL, progress = NULL, error = NULL "
            "WHERE name = %s AND version = %s AND attempt = %s"
        ).format(self.table("view"))
        values = (Jsonb(dict(built)), name, version, attempt)
        return self.connection.execute(query, values).rowcount == 1

    def set_progress(self, name: str, version: int, progress: Mapping[str, Any] | None) -> None:
        """Store the progress of a version; ``None``: it has caught up."""
        query = sql.SQL(
            "UPDATE {} SET progress = %s WHERE name = %s AND version = %s "
            "AND progress IS DISTINCT FROM %s"
        ).format(self.table("view"))
        value = None if progress is None else Jsonb(dict(progress))
        self.connection.execute(query, (value, name, version, value))

    def set_built(self, name: str, version: int, built: Mapping[str, Any] | None) -> None:
        """Store the result of a build; ``None``: the version is to be built."""
        query = sql.SQL("UPDATE {} SET built = %s WHERE name = %s AND version = %s")
        value = None if built is None else Jsonb(dict(built))
        self.connection.execute(query.format(self.table("view")), (value, name, version))

    def add_built(self, name: str, version: int, more: Mapping[str, Any]) -> None:
        """Add to the result of a build, which another thread may replace meanwhile."""
        query = sql.SQL(
            "UPDATE {} SET built = coalesce(built, '{{}}') || %s WHERE name = %s AND version = %s"
        ).format(self.table("view"))
        self.connection.execute(query, (Jsonb(dict(more)), name, version))

    def mark_unrefreshed(self, name: str, version: int) -> bool:
        """Record that the sums of a join are not refreshed any more: the next refresh is full.

        False: the version is live or built again, which another process may have asked for.
        """
        query = sql.SQL(
            "UPDATE {} SET built = built - 'tables' WHERE name = %s AND version = %s "
            "AND status <> ALL(%s)"
        ).format(self.table("view"))
        done = self.connection.execute(query, (name, version, [LIVE, BUILDING]))
        return done.rowcount == 1

    def set_options(self, name: str, version: int, options: Mapping[str, Any]) -> None:
        """Store the options of publishing a version."""
        query = sql.SQL("UPDATE {} SET options = %s WHERE name = %s AND version = %s")
        values = (Jsonb(dict(options)), name, version)
        self.connection.execute(query.format(self.table("view")), values)

    def set_caught_up(self, name: str, version: int) -> str:
        """Record once when a version caught up; returns the transaction id of that time."""
        query = sql.SQL(
            "UPDATE {} SET met_at = coalesce(met_at, pg_current_xact_id()) "
            "WHERE name = %s AND version = %s RETURNING met_at::text"
        ).format(self.table("view"))
        row = self.connection.execute(query, (name, version)).fetchone()
        assert row is not None
        return str(row[0])

    def clear_caught_up(self, name: str, version: int) -> None:
        """Clear the record that a version caught up with the core, and what it waited for."""
        query = sql.SQL(
            "UPDATE {} SET met_at = NULL, waits_for = NULL WHERE name = %s AND version = %s "
            "AND (met_at IS NOT NULL OR waits_for IS NOT NULL)"
        )
        self.connection.execute(query.format(self.table("view")), (name, version))

    def older_snapshots(self, met_at: str) -> list[tuple[int, str]]:
        """Process and application of readers whose snapshot is older than a transaction (V13).

        Once the name points to the new version, they would read an empty table under it.
        """
        query = (
            "SELECT pid, coalesce(nullif(application_name, ''), usename, '?') "
            "FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid() AND backend_xmin IS NOT NULL "
            "AND age(backend_xmin) > age(%s::xid8::xid) ORDER BY xact_start"
        )
        return self.connection.execute(query, (met_at,)).fetchall()

    def swap_published(self, name: str, old: int | None, new: int) -> bool:
        """Compare and swap the published version; returns whether it was ``old``."""
        if old is not None:
            query = sql.SQL(
                "UPDATE {} SET published = false, status = %s, status_reason = NULL, "
                "error = NULL, waits_for = NULL, progress = NULL, met_at = NULL, undone = NULL, "
                "changed_at = now() WHERE name = %s AND version = %s AND published"
            ).format(self.table("view"))
            if self.connection.execute(query, (KEPT, name, old)).rowcount != 1:
                return False
        else:
            if any(row.published for row in self.versions(name)):
                return False
        query = sql.SQL(
            "UPDATE {} SET published = true, status = %s, status_reason = NULL, error = NULL, "
            "waits_for = NULL, progress = NULL, changed_at = now(), published_at = now(), "
            "options = NULL WHERE name = %s AND version = %s"
        ).format(self.table("view"))
        return self.connection.execute(query, (LIVE, name, new)).rowcount == 1

    def remove_version(self, name: str, version: int) -> bool:
        """Delete a version's row; the caller removes its table and positions.

        False, and nothing is deleted, while readers see the version.
        """
        query = sql.SQL("DELETE FROM {} WHERE name = %s AND version = %s AND NOT published")
        return (
            self.connection.execute(query.format(self.table("view")), (name, version)).rowcount == 1
        )

    def withdraw(self, name: str) -> None:
        """Record that readers see no version of a view: its name was dropped."""
        query = sql.SQL("UPDATE {} SET published = false WHERE name = %s AND published")
        self.connection.execute(query.format(self.table("view")), (name,))

    def set_verified(self, name: str, version: int, report: Mapping[str, Any]) -> None:
        """Store the outcome of a proof, with the database's time."""
        query = sql.SQL(
            "UPDATE {} SET verified_at = now(), verified = %s WHERE name = %s AND version = %s"
        ).format(self.table("view"))
        self.connection.execute(query, (Jsonb(dict(report)), name, version))

    def model(self, entity: str) -> Mapping[str, Any] | None:
        """The stored model of an entity type; ``None``: there is none yet."""
        query = sql.SQL("SELECT model FROM {} WHERE entity = %s").format(self.table("entity_model"))
        row = self.connection.execute(query, (entity,)).fetchone()
        return None if row is None else row[0]

    def set_model(self, entity: str, model: Mapping[str, Any]) -> None:
        """Store an entity type's model."""
        query = sql.SQL(
            "INSERT INTO {} AS recorded (entity, model) VALUES (%s, %s) ON CONFLICT (entity) "
            "DO UPDATE SET model = excluded.model, noted_at = now() "
            "WHERE recorded.model IS DISTINCT FROM excluded.model"
        ).format(self.table("entity_model"))
        self.connection.execute(query, (entity, Jsonb(dict(model))))

    def begin_deployment(self, project: str, host: str) -> int:
        """Register a start of a project; returns its number: later starts have higher ones."""
        query = sql.SQL("INSERT INTO {} (project, started_on) VALUES (%s, %s) RETURNING number")
        row = self.connection.execute(
            query.format(self.table("deployment")), (project, host)
        ).fetchone()
        assert row is not None
        return int(row[0])

    def later_deployment(self, number: int, entity: str) -> str | None:
        """The last deployment after this one that decides about an entity type's views, as text.

        It is one that has declared views: of this project any, which may have left the entity type
        out, and of another project those of the entity type.
        """
        query = sql.SQL(
            "SELECT project || ' on ' || started_on || ', started ' || "
            "to_char(started_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') || ' UTC' "
            "FROM {0} WHERE number > %s AND declared <> '{{}}' AND (declared @> ARRAY[%s::text] "
            "OR project = (SELECT project FROM {0} WHERE number = %s)) "
            "ORDER BY number DESC LIMIT 1"
        ).format(self.table("deployment"))
        row = self.connection.execute(query, (number, entity, number)).fetchone()
        return None if row is None else str(row[0])

    def left_entities(self, number: int, declared: Sequence[str]) -> list[str]:
        """Entity types of this project's earlier starts that it does not declare any more.

        Those that another project declares, too, are left out.
        """
        query = sql.SQL(
            "SELECT DISTINCT entity FROM {0} AS mine JOIN {0} AS past USING (project), "
            "unnest(past.declared) AS entity WHERE mine.number = %s AND past.number < %s "
            "AND entity <> ALL(%s) AND NOT EXISTS (SELECT FROM {0} AS other "
            "WHERE other.project <> mine.project AND other.declared @> ARRAY[entity]) ORDER BY 1"
        ).format(self.table("deployment"))
        rows = self.connection.execute(query, (number, number, list(declared)))
        return [entity for (entity,) in rows]

    def declares(self, number: int, entity: str) -> bool:
        """Record that a deployment declares an entity type's views; false: it did so before."""
        query = sql.SQL(
            "UPDATE {} SET declared = declared || %s::text "
            "WHERE number = %s AND NOT declared @> ARRAY[%s::text]"
        ).format(self.table("deployment"))
        return self.connection.execute(query, (entity, number, entity)).rowcount == 1

    def unchanged_for(self, status: str, hours: float) -> list[ViewVersion]:
        """Versions that have had a status for more than so many hours.

        A version from which an operator went back is left out: the app still declares it.
        """
        query = sql.SQL(
            "SELECT " + _COLUMNS + " FROM {0} AS this WHERE status = %s "
            "AND changed_at < now() - make_interval(secs => %s) AND NOT EXISTS (SELECT FROM {0} "
            "AS seen WHERE seen.name = this.name AND seen.undone = this.fingerprint) "
            "ORDER BY name, version"
        ).format(self.table("view"))
        rows = self.connection.execute(query, (status, hours * 3600))
        return [ViewVersion(*row) for row in rows]
