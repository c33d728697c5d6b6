"""Sends the functions of Python views to Spark's tasks."""

from __future__ import annotations

import inspect

from pyspark import cloudpickle
from pyspark.sql import DataFrame

from everstate.views.project import Project


def leaving_a_slot(rows: DataFrame) -> DataFrame:
    """Rows in fewer tasks than Spark has slots: a function may not end, and others need a slot."""
    slots = rows.sparkSession.sparkContext.defaultParallelism
    return rows.coalesce(max(1, slots - 1))


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
