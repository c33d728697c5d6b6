"""Spark's tasks that call what may not answer: functions of Python views, and other stores."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pyspark import cloudpickle
from pyspark.sql import DataFrame

from everstate.views.project import Project

_changed: Final = threading.Condition()
_taken: Final[list[tuple[bool, int]]] = []
"""Each running job of this process that calls another store: whether it is long, and its slots."""


def leaving_a_slot(rows: DataFrame) -> DataFrame:
    """Rows in fewer tasks than Spark has slots: a function may not end, and others need a slot."""
    slots = rows.sparkSession.sparkContext.defaultParallelism
    return rows.coalesce(max(1, slots - 1))


@contextmanager
def sharing_slots(
    rows: DataFrame, *, is_long: bool = False, tasks_max: int | None = None
) -> Iterator[DataFrame]:
    """Rows in as many tasks as a job that calls another store may have now; waits for the first.

    A store may not answer, and the core needs a slot meanwhile: all such jobs of this process leave
    one, if Spark has three or more. Long ones leave one more for the others, and these for them.
    ``tasks_max``: the most tasks of the job that call the store.
    """
    most = max(2, rows.sparkSession.sparkContext.defaultParallelism - 1)

    def share() -> int:
        alike = sum(slots for is_as_long, slots in _taken if is_as_long == is_long)
        free = min(most - sum(slots for _, slots in _taken), most - 1 - alike)
        return min((free + 1) // 2, tasks_max or free)  # another store gets some, too

    with _changed:
        mine = (is_long, _changed.wait_for(share))
        _taken.append(mine)
    try:
        yield rows.coalesce(mine[1])
    finally:
        with _changed:
            _taken.remove(mine)
            _changed.notify_all()


def ship_functions(project: Project) -> None:
    """Make Spark send the functions of a project's views together with their code.

    Spark's workers can import the installed packages, but not the project's folder, so what a
    function uses of its own module is pickled with it.
    """
    for plan in project.views.values():
        if plan.function is not None:
            module = inspect.getmodule(plan.function.function)
            if module is not None and module.__name__ != "__main__":
                cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
