"""A view of each kind over purchases, how it is read, and the same read of a plain table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from bench.data import ENTITY, Purchase
from everstate.app import App

LAND = "land"


class Land(BaseModel):
    """A country that a purchase is joined with."""

    code: str
    continent: str
    rate: int


@dataclass(frozen=True)
class Bench:
    """A kind, and what is read of it."""

    kind: str
    declare: Callable[[App], object]
    read: str
    """Over the view `v`; `{key}` is a key at random, `{land}` a country, `{sku}` an article."""
    plain: str
    """The same of `plain`, which has the columns of a purchase, and `lands`."""
    index: str = ""
    """What a reader who knows the question would add to the plain table."""
    is_exact: bool = True
    """Whether both reads give the same rows, and not only as many."""


def app_of(*benches: Bench, history: bool = True) -> App:
    """A project with some of these views; each is named by its kind."""
    app = App("kinds")
    app.entity(ENTITY, key="id", history=history)(Purchase)
    app.entity(LAND, key="code", history=False)(Land)
    for each in benches:
        each.declare(app)
    return app


def name_of(kind: str) -> str:
    """Name of the view of a kind."""
    return "v_" + "".join(c if c.isalnum() else "_" for c in kind.lower())


def _sql(kind: str, text: str, **options: object) -> Callable[[App], object]:
    return lambda app: app.view(name_of(kind), sql=text, **options)  # type: ignore[arg-type]


_COUNTED = pa.schema([("changes", pa.int64()), ("last", pa.string())])


def _python(app: App) -> object:
    def counted(changes: pa.Table) -> pa.Table:
        present = changes.filter(pc.is_valid(changes["current"]))
        status = pc.struct_field(present["current"], "status")
        columns = {"key": present["key"], "version": present["version"], "status": status}
        found = pa.table(columns).group_by("key", use_threads=False)
        last = found.aggregate([("version", "count"), ("status", "last")])
        return last.rename_columns({"version_count": "changes", "status_last": "last"})

    declared = app.python_view(name_of("Python"), of=ENTITY, columns=_COUNTED, fields=["status"])
    return declared(counted)


LINEAR = Bench(
    "linear",
    _sql(
        "linear",
        f"SELECT country, status, count(*) AS n, sum(total) AS t FROM {ENTITY} "
        "GROUP BY country, status",
    ),
    "SELECT * FROM v",
    "SELECT country, status, count(*), sum(total) FROM plain GROUP BY country, status",
)
RIDERS = (
    Bench(
        "rows",
        _sql("rows", f"SELECT id, country, total FROM {ENTITY}"),
        "SELECT id, country, total FROM v WHERE _key = '{key}'",
        "SELECT id, country, total FROM plain WHERE id = '{key}'",
    ),
    Bench(
        "max, min",
        _sql(
            "max, min",
            f"SELECT country, max(total) AS most, min(total) AS least FROM {ENTITY} "
            "GROUP BY country",
        ),
        "SELECT * FROM v",
        "SELECT country, max(total), min(total) FROM plain GROUP BY country",
    ),
    Bench(
        "count distinct",
        _sql(
            "count distinct",
            f"SELECT status, count(DISTINCT country) AS lands FROM {ENTITY} GROUP BY status",
        ),
        "SELECT * FROM v",
        "SELECT status, count(DISTINCT country) FROM plain GROUP BY status",
    ),
    Bench(
        "top groups",
        _sql(
            "top groups",
            f"SELECT country, sum(total) AS t FROM {ENTITY} GROUP BY country "
            "HAVING count(*) > 10 ORDER BY t DESC LIMIT 3",
        ),
        "SELECT * FROM v",
        "SELECT country, sum(total) AS t FROM plain GROUP BY country HAVING count(*) > 10 "
        "ORDER BY t DESC LIMIT 3",
    ),
    Bench(
        "top rows",
        _sql("top rows", f"SELECT id, total FROM {ENTITY} ORDER BY total DESC LIMIT 10"),
        "SELECT id, total FROM v",
        "SELECT id, total FROM plain ORDER BY total DESC NULLS LAST, id DESC LIMIT 10",
        "CREATE INDEX ON plain (total DESC NULLS LAST, id DESC)",
    ),
    Bench(
        "last 30 of a category",
        _sql(
            "last 30 of a category",
            "SELECT country, id, total, row_number() OVER (PARTITION BY country ORDER BY total "
            f"DESC) AS place FROM {ENTITY} QUALIFY place <= 30",
        ),
        "SELECT id, total FROM v WHERE country = '{land}'",
        "SELECT id, total FROM plain WHERE country = '{land}' "
        "ORDER BY total DESC NULLS LAST, id DESC LIMIT 30",
        "CREATE INDEX ON plain (country, total DESC NULLS LAST, id DESC)",
    ),
    Bench(
        "windows of changes",
        _sql(
            "windows of changes",
            f"SELECT window.start AS start, count(*) AS n FROM {ENTITY}_changes "
            "GROUP BY window(occurred_at, '1 minute')",
        ),
        "SELECT * FROM v",
        "SELECT date_trunc('minute', at) AS start, count(*) FROM plain GROUP BY 1",
    ),
    Bench(
        "search",
        _sql(
            "search",
            f"SELECT id, concat_ws(' ', lines[0].sku, status) AS words FROM {ENTITY}",
            search=("words",),
        ),
        "SELECT id FROM v WHERE _words @@ websearch_to_tsquery('simple', '{sku}') LIMIT 20",
        "SELECT id FROM plain WHERE words @@ websearch_to_tsquery('simple', '{sku}') LIMIT 20",
        "CREATE INDEX ON plain USING gin (words)",
        is_exact=False,
    ),
    Bench(
        "cache",
        _sql("cache", f"SELECT id, country, status FROM {ENTITY}", ttl="24 hours"),
        "SELECT id, country, status FROM v WHERE _key = '{key}'",
        "SELECT id, country, status FROM plain WHERE id = '{key}' "
        "AND at > (SELECT max(at) FROM plain) - INTERVAL '1 day'",
        "CREATE INDEX ON plain (at)",
    ),
    Bench(
        "join",
        _sql(
            "join",
            f"SELECT p.id, p.total, l.continent FROM {ENTITY} p JOIN {LAND} l "
            "ON p.country = l.code",
        ),
        "SELECT id, total, continent FROM v WHERE id = '{key}'",
        "SELECT id, total, continent FROM plain JOIN lands ON country = code WHERE id = '{key}'",
    ),
)
JOIN_SUMS = Bench(
    "groups over a join",
    _sql(
        "groups over a join",
        f"SELECT l.continent, count(*) AS n, sum(p.total * l.rate) AS t FROM {ENTITY} p "
        f"JOIN {LAND} l ON p.country = l.code GROUP BY l.continent",
    ),
    "SELECT * FROM v",
    "SELECT continent, count(*), sum(total * rate) FROM plain JOIN lands ON country = code "
    "GROUP BY continent",
)
TIMELINE = Bench(
    "timeline",
    lambda app: app.timeline(name_of("timeline"), ENTITY, "status"),
    "SELECT status, valid_from, valid_to FROM v WHERE key = '{key}'",
    "SELECT status, at FROM plain WHERE id = '{key}' ORDER BY at",
    is_exact=False,
)
PYTHON = Bench(
    "Python",
    _python,
    "SELECT changes, last FROM v WHERE _key = '{key}'",
    "SELECT 1, status FROM plain WHERE id = '{key}'",
)
ALL = (LINEAR, *RIDERS, JOIN_SUMS, TIMELINE, PYTHON)
