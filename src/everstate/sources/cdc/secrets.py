"""How a connector gets its password: never from its settings, which every Connect user can read."""

from __future__ import annotations

from everstate.config import Config
from everstate.errors import InvalidConfig
from everstate.local.connect import secrets_dir
from everstate.private import private_folder, properties, write_private

_FIELD = "capture.password_reference"


def password_reference(config: Config, source: str, password: str, *, local: bool) -> str:
    """What to put into a connector's settings in place of ``password``.

    The local worker reads a file of mode 0600 in the project's data folder, which is written
    here. A cluster of your own looks it up by `capture.password_reference`; without that setting
    InvalidConfig is raised, since everybody could read a password in plain settings.
    """
    if not password:
        return ""
    if local:
        folder = secrets_dir(config)
        private_folder(folder)
        path = folder / f"{source}.properties"
        write_private(path, properties({"password": password}))
        return f"${{file:{path}:password}}"
    if config.capture.password_reference is None:
        expected = "how your Connect cluster looks passwords up, such as ${file:/etc/…:password}"
        raise InvalidConfig(_FIELD, None, expected)
    return config.capture.password_reference.replace("{source}", source)


def forget_password(config: Config, source: str) -> None:
    """Remove the local worker's copy."""
    (secrets_dir(config) / f"{source}.properties").unlink(missing_ok=True)
