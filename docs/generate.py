"""Writes the reference pages that the code already holds: settings, errors, the command line.

`python docs/generate.py` writes them; tests/unit/test_docs_reference.py fails when one is old.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import typer
from prometheus_client.metrics import MetricWrapperBase
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import everstate
from everstate import api_config, config, errors, sections
from everstate.cli import cli

REFERENCE = Path(__file__).parent / "reference"
_WRITTEN = "<!-- written by docs/generate.py -->\n"


def pages() -> dict[Path, str]:
    """Every generated page by its path."""
    return {
        REFERENCE / "config.md": _config_page(),
        REFERENCE / "errors.md": _errors_page(),
        REFERENCE / "cli.md": _cli_page(),
        REFERENCE / "metrics.md": _metrics_page(),
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
    for section, field in config.Config.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        what = _first_line(model).partition(": ")[2]
        lines.append(f"## [{section}]\n\n{what[:1].upper()}{what[1:]}\n")
        lines.append("| setting | default | environment | what |\n|---|---|---|---|")
        for name, info in model.model_fields.items():
            default = info.get_default(call_default_factory=True)
            shown = "" if default in (None, PydanticUndefined, {}) else f"`{_toml(default)}`"
            note = notes.get((model.__name__, name), "")
            lines.append(
                f"| `{name}` | {shown} | `EVERSTATE_{section.upper()}_{name.upper()}` | {note} |"
            )
        lines.append("")
    return "\n".join(lines)


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
    for name, error in vars(errors).items():
        if inspect.isclass(error) and issubclass(error, errors.EverstateError):
            retry = "yes" if error.retryable else ""
            lines.append(
                f"| `{name}` | {error.exit_code} | {error.http_status} | {retry} | "
                f"{_first_line(error)} |"
            )
    return "\n".join([*lines, ""])


def _cli_page() -> str:
    group = typer.main.get_command(cli)
    lines = [
        f"# Command line\n\n{_WRITTEN}",
        "`everstate [-C FOLDER] VERB …`. Results go to stdout, progress and errors to stderr.",
        "With `--json` a verb prints one JSON value. Exit codes: [errors](errors.md).\n",
    ]
    for path, command in _commands(group, "everstate"):
        lines.append(f"## {path}\n\n{inspect.cleandoc(command.help or '')}\n")
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
    return sorted(parameter.opts, key=len)


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
        told = vars(metric)
        labels = ", ".join(f"`{name}`" for name in told["_labelnames"])
        what, kind = told["_documentation"], type(metric).__name__.lower()
        rows.append(f"| `{told['_name']}` | {kind} | {labels} | {what} | `{room}` |")
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


def _first_line(thing: type) -> str:
    return (inspect.getdoc(thing) or "").partition("\n\n")[0].replace("\n", " ")


def main() -> None:
    """Write every page."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
