"""Reads the archive for analysis: entities, changes and views as Spark DataFrames."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Final

from everstate.app import App
from everstate.config import Config, load
from everstate.errors import InvalidQuery

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_UTC: Final = ("UTC", "ETC/UTC", "Z", "GMT", "+00:00")
"""Names of UTC's time zone, in capital letters."""
_ROUNDS: Final = "spark.sql.decimalOperations.allowPrecisionLoss"
"""Spark's setting that rounds decimals."""


def read(
    spark: SparkSession,
    name: str,
    *,
    at: datetime | None = None,
    recorded_at: datetime | None = None,
    position: str | None = None,
    app: App | str | None = None,
    config: Config | None = None,
) -> DataFrame:
    """Entities, or rows of a view, now or at an earlier time, read from the archive.

    ``name``: an entity type (columns: the model's fields, `_key`, `_version`, `_as_of`,
    `_recorded_at`) or a view (the columns of its SQL). ``at`` is world time, ``recorded_at`` the
    writers' clock, ``position`` a token; none of them: the archive's present position. ``spark``
    needs Delta, UTC as its time zone and, for a view, decimals that are not rounded:
    :func:`everstate.pipeline.spark.session.spark_session` makes one. Defaults of ``app``
    and ``config`` are those of the command line: everstate.toml of the working
    folder, and its `project.app`.

    Raises UnknownView, InvalidQuery, ArchiveError, Unavailable. Cost: a shuffle by key of the
    archive up to the moment.
    """
    from everstate.pipeline.requests.moment import Moment
    from everstate.pipeline.requests.past import Past

    _check_zone(spark)
    settings, project = _found(config, app)
    if name in project.views:
        _check_decimals(spark)
    return Past(spark, settings, project, Moment(at, recorded_at, position)).view(name)


def read_changes(
    spark: SparkSession,
    entity: str,
    *,
    from_: datetime | None = None,
    to: datetime | None = None,
    app: App | str | None = None,
    config: Config | None = None,
) -> DataFrame:
    """Accepted changes of an entity type that happened in ``[from_, to)`` of world time.

    Columns are those of `<entity>_history`, and the typed states `current` and `original`. The time
    is the as-of time, so that `read(at=…)` and the changes of that moment agree. Otherwise like
    :func:`read`.
    """
    from pyspark.sql import functions as F

    from everstate.pipeline.requests.moment import Moment
    from everstate.pipeline.requests.past import Past

    first, end = Moment(at=from_).at, Moment(at=to).at
    _check_zone(spark)
    settings, project = _found(config, app)
    changes = Past(spark, settings, project, Moment()).changes(entity)
    if first is not None:
        changes = changes.where(F.col("as_of") >= F.lit(first))
    return changes if end is None else changes.where(F.col("as_of") < F.lit(end))


def _check_zone(spark: SparkSession) -> None:
    """Raise InvalidQuery unless a session is in UTC: functions such as date_trunc follow it."""
    zone = str(spark.conf.get("spark.sql.session.timeZone"))
    if zone.upper() not in _UTC:
        raise InvalidQuery(
            f"the Spark session is in the time zone {zone}, so the rows of views that cut times "
            "would be others than those that are kept.",
            advice='Set `spark.conf.set("spark.sql.session.timeZone", "UTC")` before you read.',
        )


def _check_decimals(spark: SparkSession) -> None:
    """Raise InvalidQuery unless a session keeps the places of decimals: views are kept so."""
    if str(spark.conf.get(_ROUNDS, "true")).lower() != "false":
        raise InvalidQuery(
            "the Spark session rounds products of decimals that may need more than 38 digits, so "
            "the rows of views that compute them would be others than those that are kept.",
            advice=f'Set `spark.conf.set("{_ROUNDS}", "false")` before you read.',
        )


def _found(config: Config | None, app: App | str | None) -> tuple[Config, App]:
    """Settings and app, with the defaults of the command line."""
    from everstate.cli.console import load_app
    from everstate.local import resolve

    settings = config or load()
    found = app if isinstance(app, App) else load_app(app, settings)
    return resolve(settings, needs=("postgres",)), found
