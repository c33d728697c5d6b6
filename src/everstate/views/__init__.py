"""The views: definitions, SQL to plan, control tables, and the stores that keep them."""

from everstate.views.definition import ViewDefinition
from everstate.views.plan import LinearPlan, RowPlan, ViewPlan, compile_view

__all__ = ["LinearPlan", "RowPlan", "ViewDefinition", "ViewPlan", "compile_view"]
