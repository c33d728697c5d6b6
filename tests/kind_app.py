"""A project with views of every kind."""

from __future__ import annotations

from everstate.app import App
from everstate.views.definition import PythonDefinition, TimelineDefinition, ViewDefinition
from kind_cases import Shop
from kind_oracle import CASES
from view_fuzz import Sale


def kinds_app() -> App:
    """All cases in one project."""
    app = App("kinds")
    app.entity("sale", key="sale_id")(Sale)
    app.entity("shop", key="code")(Shop)
    for case in CASES:
        made = case.definition
        if isinstance(made, ViewDefinition):
            if case.name != "aside_late":  # declared by `aside`
                app.view(case.name, sql=case.sql, **case.options)
        elif isinstance(made, TimelineDefinition):
            app.timeline(case.name, made.entity, *made.attributes)
        elif isinstance(made, PythonDefinition):
            app.python_view(case.name, of=made.entity, columns=made.columns)(made.function)
    return app


app = kinds_app()
