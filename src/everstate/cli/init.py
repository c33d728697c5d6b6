"""`everstate init`: a new project that works."""

from __future__ import annotations

import shlex
from importlib.resources import as_file, files
from pathlib import Path
from shutil import copyfile
from typing import Annotated

import typer

from everstate.cli.console import out
from everstate.errors import InvalidProject


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder to create; it may exist and be empty.")
    ],
) -> None:
    """Create a project in DIR: an entity type, a view, their test, first data, a README.

    Files that are there are never written over: a folder that is not empty is refused.
    """
    made = create_project(folder)
    out.print(f"made {', '.join(made)} in {folder}", highlight=False)
    out.print("Next:", highlight=False)
    for command in (f"cd {shlex.quote(str(folder))}", "pytest", "everstate dev"):
        out.print(f"  {command}", style="cyan", highlight=False)


def create_project(folder: Path) -> list[str]:
    """Copy the template's files into a folder, and return their names.

    Raises InvalidProject when the folder has anything in it, or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise InvalidProject(f"{folder} is a file.", advice="Name a folder that does not exist.")
    if folder.is_dir() and (there := sorted(each.name for each in folder.iterdir())):
        raise InvalidProject(
            f"{folder} is not empty: it has {', '.join(there[:3])}{' …' if there[3:] else ''}.",
            advice="Name a folder that does not exist, or an empty one.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    with as_file(files("everstate.cli") / "templates" / "project") as template:
        names = sorted(each.name for each in template.iterdir() if each.is_file())
        for name in names:
            copyfile(template / name, folder / name)
    return names
