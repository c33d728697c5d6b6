"""`everstate token`: tokens for callers of the HTTP API, and the callers that there are."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import typer

from everstate.api_config import TokenConfig
from everstate.cli.console import Session
from everstate.cli.results import Aside, Result, ResultTable, Verbs
from everstate.errors import InvalidQuery
from everstate.http.tokens import hash_of, new_token

token = Verbs(no_args_is_help=True, help="Make a token for a caller of the API; list the callers.")

_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
_DAYS: Final = 365


@token.command("new")
def new(
    session: Session,
    name: Annotated[str, typer.Argument(help="Name of the caller, such as desk.")],
    days: Annotated[
        int, typer.Option("--days", min=1, max=36_500, help="How long the token is valid.")
    ] = _DAYS,
    json: bool = False,
) -> Result:
    """Make a token, and print it with its lines for everstate.toml; nothing is stored."""
    if not _NAME.fullmatch(name):
        raise InvalidQuery(f"{name!r} is no name of a caller.", advice="Use letters, digits, - _.")
    made = new_token()
    expires = (datetime.now(UTC) + timedelta(days=days)).replace(microsecond=0)
    # With --json no everstate.toml is needed.
    known = not json and name in session.config.api.tokens
    what = f"In place of the lines of [api.tokens.{name}]" if known else "Lines"
    return Result(
        {"name": name, "token": made, "token_hash": hash_of(made), "expires": expires},
        Aside("The token. It is shown this once; give it to the caller, as a password:"),
        made,
        Aside(f"{what} for everstate.toml; change the rights as needed, and start serve again:"),
        _lines(name, hash_of(made), expires),
    )


def _lines(name: str, hashed: str, expires: datetime) -> str:
    return "\n".join(
        (
            f"[api.tokens.{name}]",
            f'token_hash = "{hashed}"',
            f"expires = {expires.isoformat().replace('+00:00', 'Z')}",
            f'service = "{name}"',
            f'identifier = "{name}"',
            'permissions = { "*" = ["read"] }',
        )
    )


@token.command("list")
def list_(session: Session) -> Result:
    """List the callers of everstate.toml: until when their tokens are valid, and their rights."""
    found = [_record(name, entry) for name, entry in session.config.api.tokens.items()]
    rows = (
        (
            *(each["name"], each["state"]),
            "never" if each["expires"] is None else f"{each['expires']:%Y-%m-%d %H:%M:%S%z}",
            *(each["service"], each["identifier"]),
            "; ".join(f"{of}: {', '.join(r) or '–'}" for of, r in each["permissions"].items()),
        )
        for each in found
    )
    columns = ("caller", "state", "expires", "service", "identifier", "permissions")
    none = "there are no callers; `everstate serve` is for this machine only"
    return Result(found, ResultTable(columns, rows, none=none))


def _record(name: str, entry: TokenConfig) -> dict[str, Any]:
    is_valid = entry.expires is None or datetime.now(UTC) < entry.expires
    return {
        "name": name,
        "state": "valid" if is_valid else "expired",
        "expires": entry.expires,
        "service": entry.service,
        "identifier": entry.identifier,
        "permissions": {of: list(rights) for of, rights in entry.permissions.items()},
    }
