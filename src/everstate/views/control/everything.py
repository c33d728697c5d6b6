"""All control tables of one schema."""

from __future__ import annotations

from everstate.views.control.letters import Letters
from everstate.views.control.requests import Requests
from everstate.views.control.standing import Standings
from everstate.views.control.verdicts import Verdicts


class Control(Standings, Verdicts, Letters, Requests):
    """The control tables of one schema, through one connection; the caller commits.

    In autocommit mode each call is a separate transaction.
    """
