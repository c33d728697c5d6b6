"""Writes the reference pages that the code already holds: settings, errors, commands, the API.

`python docs/generate.py` writes them; tests/unit/test_docs_reference.py fails when one is old.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import typer
from prometheus_client.metrics import MetricWrapperBase
from pydantic import BaseModel, create_model
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import everstate
from everstate import api_config, config, errors, sections
from everstate.cli import cli
from everstate.views.stores.registry import STORES
from everstate.views.tables import HOME

REFERENCE = Path(__file__).parent / "reference"
_WRITTEN = "<!-- written by docs/generate.py -->\n"
PUBLIC = {
    "everstate.client": (
        "Client",
        "AsyncClient",
        "Event",
        "FeedPage",
        "Found",
        "RequestFailed",
        "Saved",
        "ViewRows",
    ),
    "everstate.testing.behaviour": ("Behaviour",),
    "everstate.testing.view_behaviour": ("ViewBehaviour",),
    "everstate.testing.store_contract": ("StoreContract",),
    "everstate.testing.crud_contract": ("CrudStoreContract",),
    "everstate.testing.log_checker": ("check_log",),
    "everstate.testing.command_checker": ("check_commands", "read_command_log"),
    "everstate.sources.outbox": ("Installation", "Relay", "install_outbox"),
    "everstate.sources.outbox.emit_sqlalchemy": ("emit",),
    "everstate.sources.commands": ("Answer", "wait_all"),
    "everstate.sources.crud.events": ("EventLog",),
    "everstate.sources.stores.cassandra": ("CassandraStore",),
    "everstate.sources.cdc.cleaning": ("cleaning_of",),
    "everstate.archive": ("table_path",),
    "everstate.pipeline.spark.session": ("spark_session",),
    "everstate.changes": ("ChangeCodec",),
    "everstate.log.consumer": ("Consumer",),
    "everstate.log.producer": ("Producer",),
    "everstate.log.record": ("OutRecord",),
    "everstate.log.topics": ("TopicNames", "Topics"),
    "everstate.log.dead_letters": ("place_headers",),
}
"""What a project may import beside `from everstate import …`: module → names."""


def pages() -> dict[Path, str]:
    """Every generated page by its path."""
    return {
        REFERENCE / "python.md": _python_page(),
        REFERENCE / "config.md": _config_page(),
        REFERENCE / "errors.md": _errors_page(),
        REFERENCE / "cli.md": _cli_page(),
        REFERENCE / "metrics.md": _metrics_page(),
        REFERENCE / "types.md": _types_page(),
        REFERENCE / "views.md": _views_page(),
    }


def _config_page() -> str:
    lines = [
        f"# Settings\n\n{_WRITTEN}",
        "`everstate.toml` in the project's folder; every setting may be overridden by the",
        "environment variable beside it, and a file is not needed. An unknown setting is an error.",
        "Addresses that are not set are those of the local stack (`everstate up`).\n",
    ]
    notes = {
        key: note
        for module in (config, api_config, sections)
        for key, note in _attribute_notes(inspect.getsource(module)).items()
    }
    for section, model in _sections(config.Config, ""):
        if model is sections.StoresConfig:
            section, model = "stores.NAME", sections.ViewServerConfig
        variable = section.upper().replace(".", "_")
        what = _first_line(model).partition(": ")[2]
        lines.append(f"## [{section}]\n\n{what[:1].upper()}{what[1:]}\n")
        lines.append("| setting | default | environment | what |\n|---|---|---|---|")
        for name, info in model.model_fields.items():
            if _section_of(info):
                continue
            default = info.get_default(call_default_factory=True)
            shown = "" if default in (None, PydanticUndefined, {}) else f"`{_toml(default)}`"
            note = notes.get((model.__name__, name), "")
            lines.append(f"| `{name}` | {shown} | `EVERSTATE_{variable}_{name.upper()}` | {note} |")
        lines.append("")
    return "\n".join(lines)


def _sections(model: type[BaseModel], before: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """The sections of a model, each before its own sections."""
    for name, info in model.model_fields.items():
        if section := _section_of(info):
            yield f"{before}{name}", section
            yield from _sections(section, f"{before}{name}.")


def _section_of(info: FieldInfo) -> type[BaseModel] | None:
    """The model of a setting that is a section."""
    model = info.annotation
    return model if isinstance(model, type) and issubclass(model, BaseModel) else None


def _toml(value: object) -> str:
    """A value as everstate.toml has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(str(value)) if isinstance(value, str | Path) else str(value)


def _errors_page() -> str:
    lines = [
        f"# Errors\n\n{_WRITTEN}",
        "Every error of everstate is an `EverstateError`. `exit` is what the command line returns,",
        "`HTTP` what an API answers; *retry* means that the same call may succeed later without",
        "anybody changing anything.\n",
        "| error | exit | HTTP | retry | what |\n|---|---|---|---|---|",
    ]
    classes = [each for each in vars(errors).values() if inspect.isclass(each)]
    tree = [each for each in classes if issubclass(each, errors.EverstateError)]
    for error in sorted(tree, key=lambda each: (each.__module__, each.__name__.lower())):
        retry = "yes" if error.retryable else ""
        lines.append(
            f"| `{error.__name__}` | {error.exit_code} | {error.http_status} | {retry} | "
            f"{_first_line(error)} |"
        )
    return "\n".join([*lines, ""])


def _python_page() -> str:
    lines = [
        f"# Python\n\n{_WRITTEN}",
        "What is on this page is public: it changes only with a line in the changelog. Everything",
        "else of the package may change at any time. Every error that a call raises is one of",
        "[these](errors.md).\n",
        "## from everstate import …\n",
    ]
    for name in sorted(public_names(), key=str.lower):
        lines += _public_thing(name, getattr(everstate, name))
    lines.append("## Other modules\n")
    lines.append("A service or a test imports these from their modules:\n")
    lines.append("| from | import | what |\n|---|---|---|")
    for module, names in PUBLIC.items():
        for name in names:
            thing = getattr(importlib.import_module(module), name)
            lines.append(f"| `{module}` | `{_call(name, thing)}` | {_plain(_first_line(thing))} |")
    client = importlib.import_module("everstate.client").Client
    lines.append("\n### Methods of Client and AsyncClient\n")
    lines += [*_members(client), ""]
    return "\n".join(lines)


def public_names() -> list[str]:
    """The names that `from everstate import …` offers."""
    source = Path(everstate.__file__).read_text("utf-8")
    return re.findall(r"^    from \S+ import (\w+) as \1$", source, re.MULTILINE)


def _public_thing(name: str, thing: Any) -> list[str]:
    """A name of `everstate`, what its docstring says, and its methods."""
    text = [_plain(inspect.getdoc(thing) or ""), ""]
    if thing is config.Config:
        text.append("Its sections and their fields are the [settings](config.md).\n")
    members = _members(thing) if inspect.isclass(thing) else []
    return [
        f"### {name}\n",
        f"`{_call(name, thing)}`\n",
        *text,
        *members,
        *([""] if members else []),
    ]


def _members(thing: type) -> list[str]:
    """A table of the public methods and properties that the package itself defines."""
    if issubclass(thing, Exception) or thing is config.Config:
        return []
    rows = []
    for name, member in inspect.getmembers(thing):
        function = member.fget if isinstance(member, property) else member
        if name.startswith("_") or not str(getattr(function, "__module__", "")).startswith(
            "everst"
        ):
            continue
        shown = name if isinstance(member, property) else _call(name, function, bound=True)
        rows.append(f"| `{shown}` | {_plain(_first_line(function))} |")
    return ["| method or attribute | what |\n|---|---|", *rows] if rows else []


def _call(name: str, thing: Callable[..., Any], *, bound: bool = False) -> str:
    """A name with its parameters, without their types."""
    if thing is config.Config:
        return name
    shown: list[str] = []
    given = list(inspect.signature(thing).parameters.values())
    for parameter in given[1:] if bound and given and given[0].name == "self" else given:
        is_unpacked = str(parameter.annotation).startswith("Unpack[")
        if (is_unpacked or parameter.kind is parameter.KEYWORD_ONLY) and not any(
            map(_is_star, shown)
        ):
            shown.append("*")
        if is_unpacked:
            kind = getattr(inspect.getmodule(inspect.unwrap(thing)), parameter.annotation[7:-1])
            shown += [f"{each}=None" for each in kind.__annotations__]
            continue
        default = parameter.default
        text = "" if default is parameter.empty else f"={_default(default)}"
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        shown.append(f"{stars.get(parameter.kind, '')}{parameter.name}{text}")
    return f"{name}({', '.join(shown)})"


def _is_star(shown: str) -> bool:
    return shown.startswith("*")


def _default(value: object) -> str:
    """A default, if it can be read; `…` for a function or another object."""
    plain = value is None or isinstance(value, str | int | float | bool | tuple)
    return repr(value).replace("'", '"') if plain else "…"


def _plain(text: str) -> str:
    """A docstring as Markdown."""
    named = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    return named.replace("``", "`").replace("|", "\\|")


def _cli_page() -> str:
    group = typer.main.get_command(cli)
    lines = [
        f"# Command line\n\n{_WRITTEN}",
        "`everstate [-C FOLDER] VERB …`. Results go to stdout, progress and errors to stderr.",
        "With `--json` a verb prints one JSON value. Exit codes: [errors](errors.md).\n",
    ]
    for path, command in _commands(group, "everstate"):
        paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
        lines += [f"## {path}\n", *(f"{_wrapped(each)}\n" for each in paragraphs)]
        lines.append(f"`{_synopsis(path, command)}`\n")
        rows = [row for parameter in command.params if (row := _parameter(parameter))]
        if rows:
            lines += ["| argument or option | what |\n|---|---|", *rows, ""]
    return "\n".join(lines)


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every verb below a group, with its full name."""
    for name, child in command.commands.items():
        if child.hidden:
            continue
        if hasattr(child, "commands"):
            yield from _commands(child, f"{path} {name}")
        else:
            yield f"{path} {name}", child


def _synopsis(path: str, command: Any) -> str:
    """How the command is written: arguments in their order, then that there are options."""
    words = [path]
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            name = f"{parameter.name.upper()}{' …' if parameter.nargs == -1 else ''}"
            words.append(name if parameter.required else f"[{name}]")
    needed = [each for each in command.params if each.param_type_name != "argument"]
    words += [f"{each.opts[0]} {_value(each)}" for each in needed if each.required]
    return " ".join([*words, "[OPTIONS]"])


def _value(parameter: Any) -> str:
    """What an option takes: its choices, or a word for its type; nothing for a flag."""
    if parameter.is_flag:
        return ""
    kind = parameter.type_descriptor.annotation
    kind = next(iter(get_args(kind)), kind)  # of a list: what each one is
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "{" + ",".join(str(member.value) for member in kind) + "}"
    return {int: "N", float: "N", Path: "FILE"}.get(kind, "TEXT")


def _parameter(parameter: Any) -> str | None:
    if getattr(parameter, "hidden", False) or parameter.name == "help":
        return None
    note = getattr(parameter, "help", None) or ""
    if parameter.param_type_name == "argument":
        return f"| `{parameter.name.upper()}` | {note} |"
    value = _value(parameter)
    names = ", ".join(f"`{name} {value}`".replace(" `", "`") for name in _shortest_first(parameter))
    default = parameter.default
    shown = (
        "" if parameter.is_flag or default in (None, "", [], ()) or callable(default) else default
    )
    if shown != "" and "efault" not in note:
        note = f"{note} Default: {getattr(shown, 'value', shown)}."
    return f"| {names} | {note} |"


def _shortest_first(parameter: Any) -> list[str]:
    return [*sorted(parameter.opts, key=len), *parameter.secondary_opts]


def _attribute_notes(source: str) -> dict[tuple[str, str], str]:
    """Text under each field of each class, which Python itself forgets."""
    notes: dict[tuple[str, str], str] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                text = " ".join(str(below.value.value).split()).replace("``", "`")
                notes[node.name, field.target.id] = text
    return notes


def _metrics_page() -> str:
    lines = [
        f"# Metrics\n\n{_WRITTEN}",
        "Each role serves its figures at `/metrics`, for Prometheus: on this machine only, on a",
        "free port that `everstate status` shows, or from `[metrics] port` on. Figures of the",
        "process (memory, processor time, files) come with them; a counter ends in `_total`.\n",
        "| metric | type | labels | what | module |\n|---|---|---|---|---|",
    ]
    rows = []
    for room, metric in metrics():
        shown = vars(metric)
        labels = ", ".join(f"`{name}`" for name in shown["_labelnames"])
        what, kind = shown["_documentation"], type(metric).__name__.lower()
        rows.append(f"| `{shown['_name']}` | {kind} | {labels} | {what} | `{room}` |")
    return "\n".join([*lines, *sorted(rows), ""])


def metrics() -> Iterator[tuple[str, MetricWrapperBase]]:
    """Every metric that the package exports, with the module that has it."""
    source = Path(everstate.__file__).parent
    for path in sorted(source.rglob("*.py")):
        if "from prometheus_client import" not in path.read_text("utf-8"):
            continue
        place = path.relative_to(source.parent).with_suffix("")
        module = importlib.import_module(".".join(place.parts))
        for metric in vars(module).values():
            if isinstance(metric, MetricWrapperBase):
                yield ".".join(place.parts[1:]), metric


def _types_page() -> str:
    """The tables that the tests of types run; they are beside the tests."""
    sys.path.append(str(REFERENCE.parents[1] / "tests"))
    table, columns = (importlib.import_module(name) for name in ("type_table", "column_table"))
    ways, reasons = table.WAYS_IN, list[str]()

    def cell(reason: str | None) -> str:
        if reason is None:
            return "equal"
        if reason not in reasons:
            reasons.append(reason)
        return f"refused {reasons.index(reason) + 1}"

    lines = [
        f"# Types\n\n{_WRITTEN}",
        "What becomes of the boundary and special values of each type, in every way in. The tests",
        "of everstate run these tables. A value arrives equal, or it is refused with the reason:",
        "as an error in the terminal or the answer, or as a dead letter. No value is rounded, cut",
        "off, or replaced by a default.\n",
        "## Fields of a model\n",
        "`put` means all calls in Python, a flat form for rows of Maxwell, Canal, GoldenGate",
        "and DMS, and for Debezium's from connectors of your own; these have days and times as",
        "numbers, whose unit is declared. `emit` in SQL checks the type of the column, not the",
        "model's rules.",
        f"A value that is not refused leaves equal in each way out: {', '.join(table.WAYS_OUT)}.\n",
        f"| field | value as JSON | {' | '.join(ways)} |",
        f"|---|---|{'---|' * len(ways)}",
    ]
    for kind in table.FIELD_TYPES:
        for given in kind.given:
            cells = " | ".join(cell(given.reason(way)) for way in ways)
            lines.append(f"| {_code(kind.name)} | {_code(given.text)} | {cells} |")
    lines += ["", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)), ""]
    for database, listed in columns.COLUMNS.items():
        lines += [f"## Columns of {database}\n", _wrapped(columns.INTRODUCTION[database]) + "\n"]
        lines.append("| column | field | arrives equal | is a dead letter | in the field |")
        lines.append("|---|---|---|---|---|")
        for column in listed.values():
            equal = ", ".join(_code(value) for value in column.values)
            dead = ", ".join(f"{_code(value)}: {why}" for value, why in column.dead.items())
            row = (_code(column.type), _code(column.shown), equal, dead, column.form)
            lines.append(f"| {' | '.join(row)} |")
        lines += ["", "Refused when the table is added:\n", "| column | reason |", "|---|---|"]
        lines += [f"| {_code(name)} | {why} |" for name, why in columns.REFUSED[database].items()]
        lines.append("")
    return "\n".join(lines)


_STORES_BEGIN, _STORES_END = (
    "<!-- docs/generate.py writes this table -->\n",
    "<!-- until here -->\n",
)
_BY_CITY = "FROM guest JOIN place ON guest.city = place.city"
_HOURS = "GROUP BY window(since, '1 hour')"
_OF_EACH = "QUALIFY row_number() OVER (PARTITION BY city ORDER BY nights DESC) <= 2"
_VIEWS: dict[str, dict[str, Any]] = {
    "rows": {"sql": "SELECT city FROM guest"},
    "what has changed": {"sql": "SELECT city FROM guest_changes"},
    "all states, with their times": {"sql": "SELECT city FROM guest_history"},
    "sums, counts, averages": {"sql": "SELECT city, count(*) AS n FROM guest GROUP BY city"},
    "`min`, `max`, `count(DISTINCT x)`": {
        "sql": "SELECT city, min(nights) AS n FROM guest GROUP BY city"
    },
    "top lists": {"sql": "SELECT city FROM guest ORDER BY nights DESC LIMIT 3"},
    "last or top n of a category": {"sql": f"SELECT city, nights FROM guest {_OF_EACH}"},
    "windows of time": {"sql": f"SELECT window.start AS start, count(*) AS n FROM guest {_HOURS}"},
    "the option `indexes`": {"sql": "SELECT city FROM guest", "indexes": ("city",)},
    "search": {"sql": "SELECT city FROM guest", "search": ("city",)},
    "cache": {"sql": "SELECT city FROM guest", "ttl": "1 hour"},
    "two entity types": {"sql": f"SELECT guest.nights, place.name {_BY_CITY}"},
    "groups over two": {"sql": f"SELECT place.name, count(*) AS n {_BY_CITY} GROUP BY place.name"},
    "a policy that throttles": {
        "sql": "SELECT city FROM guest",
        "policies": [everstate.throttle(per_second=1, actor="importer")],
    },
}
"""A view of each kind, for the table of what each store keeps."""


def _views_page() -> str:
    """The page as it is, with a new table of kinds of views and stores."""
    before, _, rest = (REFERENCE / "views.md").read_text("utf-8").partition(_STORES_BEGIN)
    names = [name for name in STORES if name != HOME]
    lines = [f"| kind | `{HOME}` | {' | '.join(f'`{name}`' for name in names)} |"]
    lines.append(f"|---|---|{'---|' * len(names)}")
    for kind, options in _VIEWS.items():
        cells = [_kept_in(name, options) for name in (HOME, *names)]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    return f"{before}{_STORES_BEGIN}\n{table}\n\n{_STORES_END}{rest.partition(_STORES_END)[2]}"


def _kept_in(store: str, options: dict[str, Any]) -> str:
    """`yes`, or why a view is refused that is declared in a store."""
    app = everstate.App("hotel")
    columns: dict[str, Any] = {"city": (str, ...), "nights": (int, ...), "name": (str, ...)}
    columns["since"] = (datetime, ...)
    app.entity("guest", key="name")(create_model("Guest", **columns))
    app.entity("place", key="city")(create_model("Place", **columns))
    try:
        app.view("shown", store=store, **options)
    except errors.InvalidView as refused:
        reason = refused.message.removeprefix("view shown: ")
        reason = reason.removeprefix(f"it cannot be kept in the store {store}: ")
        return f"no: {reason.replace(f' in the store {store}', '').rstrip('.')}"
    return "yes"


def _code(text: str) -> str:
    """Text as code within a cell of a table."""
    shown = text if len(text) <= 60 else f"{text[:57]}…"
    return f"`{shown}`".replace("|", "\\|")


def _wrapped(paragraph: str) -> str:
    """A paragraph in the lines of a page."""
    return textwrap.fill(paragraph, 120, break_on_hyphens=False, break_long_words=False)


def _first_line(thing: type) -> str:
    return (inspect.getdoc(thing) or "").partition("\n\n")[0].replace("\n", " ")


def main() -> None:
    """Write every page."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
