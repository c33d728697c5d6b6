"""All control tables of one schema."""

from __future__ import annotations

from everstate.views.control.dead_letters import DeadLetterTable
from everstate.views.control.requests import Requests
from everstate.views.control.statuses import ViewStatuses
from everstate.views.control.verdicts import Verdicts


class Control(ViewStatuses, Verdicts, DeadLetterTable, Requests):
    """The control tables of one schema, through one connection; the caller commits.

    In autocommit mode each call is a separate transaction.
    """
