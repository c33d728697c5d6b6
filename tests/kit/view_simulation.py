"""Seeded schedules of all actors that keep views, in memory, compared with the oracle.

The schedules have two keepers of different applications, failing and slow views, trailing views
here and in another store, versions that are built, published, undone and retired, readers with old
snapshots, retention, a database that is restored from a backup, and kills. All decisions are made
by production code (`views.core`, `views.trailing`, `views.publishing`, `views.versions`); the
simulation only chooses the next actor, also between two calls of a transaction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final

from everstate.errors import Unavailable as Killed
from everstate.views.control import BUILDING, KEPT, LIVE, RETIRED, WAITING, ViewVersion
from everstate.views.publishing import publish
from everstate.views.tables import Row, Vector, covers, physical
from everstate.views.versions import passed_by_all, to_come
from kit.view_actors import (
    MIRRORED,
    MemoryPublisher,
    RepeatableReader,
    Subscriber,
    note,
)
from kit.view_memory import LockTaken
from kit.view_memory_orders import (
    LATEST,
    SHOWN,
    open_positions,
    shown_of,
    trim,
    vector_of,
)
from kit.view_oracle import OracleTables, accepted, expected
from kit.view_orders import Log, Logged
from kit.view_world import OLDER, PARTITIONS, PLANS, World

_NEST: Final = 0.12
_KILL: Final = 0.01
_DEPTH_MAX: Final = 2
_SETTLE_MAX: Final = 80
_SUBSCRIBERS_MAX: Final = 4
_SHOWN: Final = {"order_history": "history"}
"""Views that have another name in the oracle's tables."""
_APPLICATIONS: Final = (None, None, frozenset(PLANS) - {"open_orders"}, frozenset({OLDER}))
"""Applications of keepers: all views in the database, only some, or with other fingerprints."""


class Wrong(AssertionError):
    """A reader saw a forbidden state, or the final state is not as it must be."""


class Simulation(World):
    """One schedule; :meth:`run` raises Wrong when a guarantee is violated."""

    publisher_class: ClassVar[type[MemoryPublisher]] = MemoryPublisher
    subscriber_class: ClassVar[type[Subscriber]] = Subscriber

    def __init__(self, seed: int, logs: list[Log] | None = None) -> None:
        super().__init__(seed, logs)
        self.store.between = self._between
        self._expected: dict[tuple[int, ...], OracleTables] = {}
        self._backup: dict[str, dict[Any, Any]] | None = None
        self._last_seen: dict[str, Vector] = {}
        self._seen: dict[str, tuple[Any, int, Vector]] = {}
        """A table's rows, how often they were written, and their vector, when they were right."""
        self._depth = 0
        self.subscribers: list[Subscriber] = []
        # Each schedule has its own weights: some publish often, some hardly ever.
        self._weights = [w * self.random.choice((0.3, 1, 1, 3)) for w in ACTIONS.values()]

    def run(self, actions: int = 80) -> None:
        """Run actors in a random order, then let all catch up, and compare everything."""
        for _ in range(actions):
            with suppress(LockTaken, Killed):
                self._act()
            if self.random.random() < 0.3:
                self.look()
        self._settle()

    def _act(self) -> None:
        (action,) = self.random.choices(list(ACTIONS), self._weights)
        action(self)

    def _between(self, call: str) -> None:
        """Before each call of a transaction: other actors run, or the process is killed."""
        if self.is_settling:
            return
        if self.random.random() < _KILL:
            raise Killed(f"killed at {call}")
        if self._depth < _DEPTH_MAX and self.random.random() < _NEST:
            self._depth += 1
            try:
                with suppress(LockTaken, Killed):
                    self._act()
            finally:
                self._depth -= 1

    # who acts

    def produce(self) -> None:
        """Append records to the log."""
        p = self.random.choice(PARTITIONS)
        self.ends[p] = min(self.logs[p].end, self.ends[p] + self.random.randint(1, 4))

    def archive(self) -> None:
        """Archive some of the records that are not archived yet."""
        p = self.random.choice(PARTITIONS)
        self.archived[p] = self.random.randint(self.archived[p], self.ends[p])

    def forget_log(self) -> None:
        """Retention: delete the log's oldest records, which the archive has."""
        p = self.random.choice(PARTITIONS)
        self.log_begins[p] = self.random.randint(self.log_begins[p], self.archived[p])

    def keep(self) -> None:
        """One of two keepers plans a range."""
        self.plan_keeping(self.random.choice(_APPLICATIONS))

    def trail(self) -> None:
        """The lagging views plan ranges."""
        self.plan_trailing(self.random.choice(_APPLICATIONS))

    def run_task(self) -> None:
        """Run a planned task, which may run again later."""
        if self.pending:
            task = self.pending.pop(self.random.randrange(len(self.pending)))
            if self.random.random() < 0.15:
                self.pending.append(task)
            task()

    def trim(self) -> None:
        """The keeper drops notes that all positions have passed."""
        places = self.database.table("position").items()
        vectors = [{p: offset} for (*_, p), (offset, _) in places]
        vectors.append(self.foreign_vector())
        self.happened["trimmed"] += trim(self.database, self.notes_below(vectors))

    def notes_below(self, vectors: Sequence[Vector]) -> dict[int, int]:
        """The offsets before which notes are dropped."""
        return passed_by_all(dict(enumerate(self.archived)), vectors)

    def build(self) -> None:
        """Start to build a waiting version: its positions are created at a vector (V6)."""
        waiting = [r for r in self.versions() if r.status == BUILDING and r.built is None]
        if waiting:
            self.open_build(self.random.choice(waiting), self.build_vector())

    def build_vector(self) -> Vector:
        """The vector up to which a version is built."""
        core = self.core_vector()
        return {p: min(self.archived[p], core[p]) for p in PARTITIONS}

    def open_build(self, row: ViewVersion, vector: Vector) -> None:
        """In one transaction; afterwards no note that it needs after the vector is trimmed."""
        attempt = object()
        self.empty(row)
        self.database.table("attempt")[row.name, row.version] = attempt
        place = (row.name, row.version, row.fingerprint)
        open_positions(self.database, *place, PARTITIONS, vector)
        self.database.commits += 1
        self.pending.append(partial(self.load, row, vector, attempt))

    def publish(self) -> None:
        """Publish built versions that have the core's position."""
        publisher = self.publisher_class(self.database, self.readers)
        for row in self.versions():
            if row.status == BUILDING and row.built is not None:
                self.happened["published"] += publish(publisher, row, PLANS[row.name])

    def declare(self) -> None:
        """Start the application with other views: changed, removed, or added again."""
        name = self.random.choice(list(PLANS))
        if name in self.declared and self.random.random() < 0.3:
            del self.declared[name]
        else:
            meaning = f"{PLANS[name].fingerprint}{self.random.choice(('', '/other'))}"
            self.declared[name] = replace(PLANS[name], fingerprint=meaning)
        self.take_steps()

    def rebuild(self) -> None:
        """Request a new version with the same fingerprint."""
        rows = self.versions()
        building = {row.name for row in rows if row.status == BUILDING}
        published = [r for r in rows if r.published and r.status == LIVE and r.name not in building]
        if published:
            row = self.random.choice(published)
            number = self.numbers()[row.name] + 1
            fresh: dict[str, Any] = {"published": False, "built": None, "published_at": None}
            self.add(
                replace(row, version=number, status=BUILDING, error=None, waits_for=None, **fresh)
            )

    def undo(self) -> None:
        """Request that readers see the previous version again."""
        seen = {row.name: row for row in self.versions() if row.published}
        kept = [
            row
            for row in self.versions()
            if row.status == KEPT and self.vector(row) and row.version < seen[row.name].version
        ]
        if kept:
            row = self.random.choice(kept)
            rows = [other for other in self.versions() if other.name == row.name]
            coming = to_come(rows)
            for other in rows:
                if other.status in (BUILDING, WAITING):
                    self.give_up(other)
            if coming is not None:
                number = self.numbers()[row.name] + 1
                self.add(replace(coming, version=number, status=WAITING, built=None))
            self.go_back(row, coming or seen[row.name])
            self.happened["undone"] += 1

    def go_back(self, row: ViewVersion, seen: ViewVersion) -> None:
        """Let an older version catch up; starts of the same application leave it."""
        note(self.database, row, status=BUILDING, undone=seen.undone or seen.fingerprint)

    def start_again(self) -> None:
        """Start the application as it is: what an operator asked for goes on."""
        before = {
            (row.name, row.version)
            for row in self.versions()
            if row.status == BUILDING and row.name in self.declared
        }
        seen = {(row.name, row.version) for row in self.versions() if row.published}
        self.take_steps()
        after = {(row.name, row.version) for row in self.versions() if row.status == BUILDING}
        if lost := before - after:
            self._wrong(f"a start gives up {lost}")
        turned = {name for name, _ in after - before} & {name for name, _ in seen}
        if turned:
            self._wrong(f"a start replaces {turned}, and nothing else is declared")

    def forget_old(self) -> None:
        """Drop versions replaced long ago, and the positions of those retired long ago (V3)."""
        waits = {key[1:3] for key in self.database.locks if key[0] == "position"}
        for row in self.versions():
            if (row.name, row.version) in waits:
                continue  # a transaction moves it
            if row.status == KEPT and self.random.random() < 0.3:
                self.forget(row)
            elif row.status == RETIRED and self.random.random() < 0.3:
                self.close_positions(row)

    def fail(self) -> None:
        """A view starts to refuse a change, or all views stop refusing."""
        if self.failing and self.random.random() < 0.4:
            self.failing.clear()
        else:
            p = self.random.choice(PARTITIONS)
            offset = self.random.randint(0, self.logs[p].end)
            self.failing.add((self.random.choice(list(PLANS)), p, offset))

    def read(self) -> None:
        """A reader starts, or ends."""
        if self.readers and self.random.random() < 0.5:
            self.readers.pop(self.random.randrange(len(self.readers)))
        else:
            self.readers.append(RepeatableReader(self.database))

    def follow(self) -> None:
        """A subscriber starts at a view's position, or reads more changes."""
        if len(self.subscribers) < _SUBSCRIBERS_MAX and self.random.random() < 0.3:
            published = [row for row in self.versions() if row.published and self.vector(row)]
            self.subscribers.append(
                self.subscriber_class(self.vector(self.random.choice(published)))
            )
        elif self.subscribers:
            p = self.random.choice(PARTITIONS)
            subscriber = self.random.choice(self.subscribers)
            most = self.random.choice((1, 2, 99))
            subscriber.read(self.store, p, self.logs[p], self.ends[p], most)

    def back_up(self) -> None:
        """Back up the database."""
        if not self._depth:
            self._backup = self.database.copied()

    def restore(self) -> None:
        """Restore the database from its backup; running actors continue."""
        if self._depth or self._backup is None:
            return
        self.database.rows = {name: dict(rows) for name, rows in self._backup.items()}
        self.database.commits += 1
        self.readers.clear()  # their connections broke
        self._last_seen.clear()
        self.take_steps()  # the backup may be from before the last declaration
        self.happened["restored"] += 1

    # what must hold

    def at(self, vector: Vector) -> OracleTables:
        """The oracle's tables at a vector."""
        place = tuple(vector[p] for p in PARTITIONS)
        if place not in self._expected:
            self._expected[place] = expected(self.judged, vector)
        return self._expected[place]

    def go_on(self) -> None:
        """Run planned tasks, and every actor once, without disturbances."""
        self.is_settling = True
        self.plan_keeping(None)
        self.plan_trailing(None, all_of_them=True)
        self.build()
        while self.pending:
            with suppress(Killed):
                self.pending.pop(0)()
        self.publish()

    def look(self) -> None:
        """Check what readers see now, and in their open snapshots."""
        rows = self.database.rows
        wanted = self.at(self.core_vector())
        self._same("latest", shown_of(rows, LATEST, 1), wanted.latest)
        counters = self.database.table("counters").values()
        applied, duplicate, held, dead = (
            sum(counted[place] for counted in counters) for place in range(4)
        )
        # Which of two records is the dead one depends on what was read of the history.
        account = {"applied": applied, "held": held, "duplicate or dead": duplicate + dead}
        right = (wanted.applied, wanted.held, wanted.duplicate + wanted.dead)
        self._same("account", account, dict(zip(account, right, strict=True)))
        for row in self.versions():
            vector = self.vector(row)
            if not row.published or not vector:
                continue
            table = physical(row.name, row.version)
            state = (rows.get(table), self.database.written[table], vector)
            was = self._seen.get(table)
            if was is None or was[0] is not state[0] or was[1:] != state[1:]:
                self._see(row, rows, vector)
                self._seen[table] = state
            if not covers(vector, self._last_seen.get(row.name, {})):
                self._wrong(f"{row.name} went back from {self._last_seen[row.name]} to {vector}")
            self._last_seen[row.name] = vector
            for reader in self.readers:
                self._read_in(reader, row)

    def _read_in(self, reader: RepeatableReader, row: ViewVersion) -> None:
        """Check an old snapshot: names resolve to the version published now, rows are older."""
        if (row.name, row.version) in reader.checked:
            return
        vector = vector_of(reader.rows, row.name, row.version)
        if not vector:
            self._wrong(f"an older snapshot reads nothing of {row.name}, version {row.version}")
        self._see(row, reader.rows, vector)
        before = [
            vector_of(reader.rows, row.name, version)
            for (name, version), known in reader.rows["view"].items()
            if name == row.name and known.published
        ]
        if before and not covers(vector, before[0]):
            self._wrong(f"an older snapshot reads {row.name} at {vector}, before {before[0]}")
        reader.checked.add((row.name, row.version))

    def _see(self, row: ViewVersion, rows: Mapping[str, Any], vector: Vector) -> None:
        field = _SHOWN.get(row.name, row.name)
        found = shown_of(rows, row.name, row.version)
        self._same(f"{row.name}, version {row.version}", found, getattr(self.at(vector), field))

    def _settle(self) -> None:
        """Stop all failures, and run until every view is at its final position."""
        self.is_settling = True
        self.readers.clear()
        for p in PARTITIONS:
            self.ends[p] = self.archived[p] = self.logs[p].end
        self._core_goes_on()
        self.failing.clear()
        self.take_steps()
        for _ in range(_SETTLE_MAX):
            self.go_on()
            if not (left := self._left()):
                break
        else:
            self._wrong(f"it does not come to an end: {left}")
        self.look()
        for subscriber in self.subscribers:
            self._see_all(subscriber)
        wanted = getattr(self.at(self.core_vector()), MIRRORED[self.foreign.view])
        self._same("mirror", self.foreign_rows(), wanted)

    def foreign_rows(self) -> list[Row]:
        """The rows that readers see of the view in another store."""
        rows = self.store.elsewhere.table(self.foreign.name)
        return SHOWN[MIRRORED[self.foreign.view]](rows)

    def _see_all(self, subscriber: Subscriber) -> None:
        """Check that a subscriber got every change since its start, once, versions in order."""
        for p in PARTITIONS:
            subscriber.read(self.store, p, self.logs[p], self.ends[p], 10**9)
        before = {id(record) for record in accepted(self.judged, subscriber.since)}
        wanted = [r for r in accepted(self.judged, self.core_vector()) if id(r) not in before]
        self._same("what came", _by_key(subscriber.given), _by_key(wanted))
        self.happened["followed"] += len(subscriber.given)

    def _core_goes_on(self) -> None:
        """Check that the core reaches the log's end while failing views lag behind (C13)."""
        while self.core_vector() != dict(enumerate(self.ends)):
            before = self.core_vector()
            for _ in range(3):
                self.plan_keeping(None)
                while self.pending:
                    with suppress(Killed):
                        self.pending.pop()()
            if self.core_vector() == before:
                self._wrong(f"the core stands still at {before}")

    def _left(self) -> list[str]:
        """Names of the core and of views that are not in their final state."""
        core = self.core_vector()
        found = [f"core at {core}"] if core != dict(enumerate(self.ends)) else []
        if self.foreign_vector() != core:
            found.append("mirror")
        published = {row.name: row for row in self.versions() if row.published}
        for name, plan in self.declared.items():
            row = published.get(name)
            wanted = row is not None and plan.fingerprint in (row.fingerprint, row.undone)
            if row is None or not wanted or self.vector(row) != core:
                found.append(f"{name}: {row}")
        return found + [f"{r.name} builds" for r in self.versions() if r.status == BUILDING]

    def _same(self, what: str, found: object, wanted: object) -> None:
        if found != wanted:
            self._wrong(f"{what} is {found}, must be {wanted}")

    def _wrong(self, problem: str) -> None:
        raise Wrong(f"seed {self.seed}: {problem}")


def _by_key(changes: Iterable[Logged]) -> dict[str, list[tuple[int, str]]]:
    """Version and id of each change of a key, in their order."""
    found: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for change in changes:
        found[change.key].append((change.version, change.change_id))
    return dict(found)


ACTIONS: Final[Mapping[Callable[[Simulation], None], float]] = {
    Simulation.produce: 14,
    Simulation.archive: 8,
    Simulation.forget_log: 2,
    Simulation.keep: 12,
    Simulation.trail: 12,
    Simulation.run_task: 34,
    Simulation.trim: 8,
    Simulation.build: 8,
    Simulation.publish: 8,
    Simulation.declare: 3,
    Simulation.start_again: 3,
    Simulation.rebuild: 3,
    Simulation.undo: 3,
    Simulation.forget_old: 1.5,
    Simulation.fail: 3,
    Simulation.read: 4,
    Simulation.follow: 6,
    Simulation.back_up: 1,
    Simulation.restore: 0.7,
}
"""Actors, with the relative frequency of each."""
