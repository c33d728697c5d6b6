"""Dashboard and alert rules name only metrics and labels that everstate exports."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import REGISTRY

from everstate.runtime.figures import ROLES

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
RULES = MONITORING / "prometheus-rules.yml"
DASHBOARD = MONITORING / "grafana-dashboard.json"
OF_PROMETHEUS = {"job", "instance", "role"}
"""Labels that the scrape settings add to every metric."""
_SUFFIXES = {
    "counter": {"_total": set[str]()},
    "gauge": {"": set[str]()},
    "histogram": {"_bucket": {"le"}, "_sum": set[str](), "_count": set[str]()},
}


@cache
def exported() -> Mapping[str, frozenset[str]]:
    """Name of each time series → its labels; those of the process included."""
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    found: dict[str, frozenset[str]] = {"up": frozenset(OF_PROMETHEUS)}
    for _, metric in generator.metrics():
        told, kind = vars(metric), type(metric).__name__.lower()
        for suffix, more in _SUFFIXES[kind].items():
            labels = {*told["_labelnames"], *more, *OF_PROMETHEUS}
            found[f"{told['_name']}{suffix}"] = frozenset(labels)
    for family in REGISTRY.collect():
        if family.name.startswith("process_"):
            found |= {each.name: frozenset(OF_PROMETHEUS) for each in family.samples}
    return found


def selectors(expression: Any) -> Iterator[Any]:
    """Every vector selector below a parsed expression."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    elif isinstance(expression, promql_parser.MatrixSelector):
        yield expression.vector_selector
    for name in ("expr", "lhs", "rhs"):
        if hasattr(expression, name):
            yield from selectors(getattr(expression, name))
    for each in getattr(expression, "args", ()):
        yield from selectors(each)


def aggregations(expression: Any) -> Iterator[Any]:
    """Every aggregation below a parsed expression."""
    if isinstance(expression, promql_parser.AggregateExpr):
        yield expression
    for name in ("expr", "lhs", "rhs"):
        if hasattr(expression, name):
            yield from aggregations(getattr(expression, name))
    for each in getattr(expression, "args", ()):
        yield from aggregations(each)


def faults(query: str) -> list[str]:
    """What a query names and nobody exports. Raises ValueError when it does not parse."""
    parsed, found = promql_parser.parse(query), list[str]()
    for each in selectors(parsed):
        labels = exported().get(each.name)
        if labels is None:
            found.append(f"metric {each.name}")
            continue
        named = {matcher.name for matcher in each.matchers.matchers}
        found += [f"label {name} of {each.name}" for name in sorted(named - labels)]
    for each in aggregations(parsed):
        grouped = set(each.modifier.labels) if each.modifier is not None else set()
        for one in selectors(each.expr):
            lacking = grouped - exported().get(one.name, frozenset(grouped))
            found += [f"label {name} of {one.name}" for name in sorted(lacking)]
    return found


def labels_of(expression: Any) -> set[str]:
    """Labels of the result of an expression."""
    if isinstance(expression, promql_parser.AggregateExpr):
        return set(expression.modifier.labels) if expression.modifier is not None else set()
    if isinstance(expression, promql_parser.BinaryExpr):
        return labels_of(expression.lhs)
    return set().union(*(exported()[each.name] for each in selectors(expression)))


def unknown_labels(query: str, text: str) -> set[str]:
    """Labels that a text for people shows, and that the query's result does not have."""
    shown = set(re.findall(r"\$labels\.(\w+)|\{\{\s*(\w+)\s*\}\}", text))
    named = {one or other for one, other in shown}
    return named - labels_of(promql_parser.parse(query))


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def targets() -> list[tuple[str, str]]:
    """Query and legend of each line of the dashboard."""
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    found = [target for panel in panels for target in panel.get("targets", ())]
    return [(target["expr"], target["legendFormat"]) for target in found]


def test_every_rule_asks_for_what_is_exported() -> None:
    assert len(rules()) >= 15
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert faults(rule["expr"]) == [], rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert re.fullmatch(r"\d+m", rule.get("for", "0m"))
        for text in rule["annotations"].values():
            assert unknown_labels(rule["expr"], text) == set(), rule["alert"]


def test_every_panel_asks_for_what_is_exported() -> None:
    assert len(targets()) >= 25
    for query, legend in targets():
        assert faults(query) == [], query
        assert unknown_labels(query, legend) == set(), query


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text("utf-8"))["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in _rows(at)}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def _rows(place: Mapping[str, int]) -> range:
    return range(place["y"], place["y"] + place["h"])


def test_every_metric_about_something_wrong_is_shown() -> None:
    """A metric that nobody looks at would be found by nobody either."""
    asked = [rule["expr"] for rule in rules()] + [query for query, _ in targets()]
    used = {each.name for query in asked for each in selectors(promql_parser.parse(query))}
    base = {re.sub("_(total|bucket|sum|count)$", "", name) for name in used}
    ours = {
        re.sub("_(total|bucket|sum|count)$", "", name)
        for name in exported()
        if name.startswith("everstate_")
    }
    assert ours - base == {
        "everstate_alerts_sent",
        "everstate_clean_provenance_percent",
        "everstate_clean_snapshots_asked",
        "everstate_drift_checked_seconds",
        "everstate_drift_repaired_entities",
        "everstate_drift_share",
    }


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("max(everstate_view_late) > 0", "metric everstate_view_late"),
        ("rate(everstate_archive_records[5m])", "metric everstate_archive_records"),
        ("everstate_view_behind{entity='a'}", "label entity of everstate_view_behind"),
        ("sum by (topic) (everstate_view_behind)", "label topic of everstate_view_behind"),
        ("vector(0) or (-everstate_gone > 1)", "metric everstate_gone"),
    ],
)
def test_what_nobody_exports_is_noticed(query: str, fault: str) -> None:
    assert faults(query) == [fault]


def test_a_query_with_an_error_and_a_text_with_an_unknown_label_are_noticed() -> None:
    with pytest.raises(ValueError, match="parenthesis"):
        faults("sum by (view (everstate_view_behind)")
    assert unknown_labels("sum by (view) (everstate_view_behind)", "{{ $labels.topic }}") == {
        "topic"
    }
    assert unknown_labels("everstate_view_behind", "{{view}} {{topic}}") == {"topic"}


def test_the_scrape_settings_have_the_ports_of_the_roles() -> None:
    settings = yaml.safe_load((MONITORING / "prometheus.yml").read_text("utf-8"))
    (job,) = settings["scrape_configs"]
    assert settings["rule_files"] == [RULES.name]
    for group in job["static_configs"]:
        port = 9400 + ROLES.index(group["labels"]["role"])
        assert group["targets"] == [f"127.0.0.1:{port}"]
    others = dict(re.findall(r"(94\d\d) (\w+)", (MONITORING / "prometheus.yml").read_text("utf-8")))
    assert {name: 9400 + ROLES.index(name) for name in others.values()} == {
        name: int(port) for port, name in others.items()
    }
