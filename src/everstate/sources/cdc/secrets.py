"""How a connector finds its password: never in its settings, which everybody at Connect reads."""

from __future__ import annotations

from everstate.config import Config
from everstate.errors import InvalidConfig
from everstate.local.connect import secrets_dir
from everstate.local.files import write_private

_FIELD = "capture.password_reference"


def password_reference(config: Config, source: str, password: str, *, local: bool) -> str:
    """What to put into a connector's settings in place of ``password``.

    The local worker reads a file of mode 0600 in the project's data folder, which is written
    here. A cluster of your own looks it up where `capture.password_reference` says; without that
    setting InvalidConfig is raised: a password in plain settings would be shown to everybody.
    """
    if not password:
        return ""
    if local:
        folder = secrets_dir(config)
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        path = folder / f"{source}.properties"
        write_private(path, f"password={_as_property(password)}\n")
        return f"${{file:{path}:password}}"
    if config.capture.password_reference is None:
        expected = "how your Connect cluster looks passwords up, such as ${file:/etc/…:password}"
        raise InvalidConfig(_FIELD, None, expected)
    return config.capture.password_reference.replace("{source}", source)


def _as_property(value: str) -> str:
    """A value as Java reads it from a properties file."""
    for character, escaped in (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r"), (" ", "\\ ")):
        value = value.replace(character, escaped)
    return value


def forget_password(config: Config, source: str) -> None:
    """Remove the local worker's copy."""
    (secrets_dir(config) / f"{source}.properties").unlink(missing_ok=True)
