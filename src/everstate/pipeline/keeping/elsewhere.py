"""Upkeep of a store besides PostgreSQL, each minute or so, whatever is built in it meanwhile.

Readers there see the version that the registry names, and what nobody needs is dropped.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, suppress
from typing import Final

from everstate.config import Config
from everstate.errors import InvalidView, StoreSilent, ViewFailed, ViewRowsMissing
from everstate.views.control import DROPPED, Control, opened_control
from everstate.views.stores import store_class, versioned_store
from everstate.views.tables import HOME

logger = logging.getLogger(__name__)

_UPKEEP_S: Final = 60.0


def upkeep_every_s(store: str) -> float:
    """Seconds between two calls of :func:`upkeep`: a minute, or as the store's class says."""
    with suppress(InvalidView):  # its class cannot be loaded
        return float(getattr(store_class(store, store), "shown_every_s", _UPKEEP_S))
    return _UPKEEP_S


def upkeep(config: Config, store: str) -> None:
    """Let readers of a store see what the registry says, and drop what nobody needs there.

    Raises Unavailable when PostgreSQL does not answer.
    """
    with opened_control(config) as control:
        show_elsewhere(control, config, store)
        drop_elsewhere(control, config, store)


def show_elsewhere(control: Control, config: Config, store: str, view: str | None = None) -> None:
    """Let readers in a store see what the registry says of a view; ``None``: of all.

    Made again and again: a call that was given up may be carried out later, after another one.
    """
    stored = control.versions(view)
    for name in sorted({row.name for row in stored if row.store == store and not row.is_topic}):
        try:
            show_one(control, config, name, store)
        except (ViewFailed, InvalidView) as cause:
            logger.info("readers of %s are shown its version later: %s", name, cause)
            if isinstance(cause, StoreSilent):
                break


def show_one(control: Control, config: Config, view: str, store: str) -> None:
    """Let readers of a view in another store see what the registry says; raises ViewFailed."""
    with readers_duty(control, view, store):
        rows = (row for row in control.versions(view) if row.published and row.store == store)
        shown = next(rows, None)
        kept = versioned_store(config, view, store, "" if shown is None else shown.attempt)
        if shown is None:
            kept.drop_reader(view)
            return
        try:
            kept.show(view, shown.version)
        except ViewRowsMissing as missing:
            # No change may come for long that would find it missing.
            control.record(view, shown.version, waits_for=str(missing))
            raise
        control.record(view, shown.version, waits_for=None)


def drop_elsewhere(control: Control, config: Config, store: str) -> None:
    """Drop tables that nobody needs in a store; later, while it does not answer.

    They are those of dropped versions, and of attempts after which another one began. While a
    proof reads the version, or a process builds for the store, they stay, too. What readers see is
    told first, because their name must not outlive the last table of a view, and again after the
    table is gone: until then a call that was given up may have published it.
    """
    left = [each for each in control.left_tables() if each[2] == store]
    for name, version, _, attempt in left:
        try:
            with building(control, store) as is_mine, control.writing(name, version) as is_free:
                if is_mine and is_free:
                    show_one(control, config, name, store)
                    versioned_store(config, name, store, attempt).drop(name, version)
                    show_one(control, config, name, store)
                    control.remove_table(name, version, attempt)
        except (ViewFailed, InvalidView) as cause:
            logger.info("a table of view %s is dropped later: %s", name, cause)
            rows = (row for row in control.versions(name) if row.version == version)
            if any(row.status == DROPPED for row in rows):
                control.record(name, version, error=str(cause))
            if isinstance(cause, StoreSilent):
                break
    control.remove_dropped()


def building(control: Control, store: str) -> AbstractContextManager[bool]:
    """The duty of building in a store, whatever else a process builds; see `Schema.duty`."""
    return control.duty("builds" if store == HOME else f"builds in {store}")


def readers_duty(control: Control, view: str, store: str) -> AbstractContextManager[object]:
    """Wait until nobody else reads the registry and tells that store: an older call would win."""
    return control.duty(f"readers of {view} in {store}", waits=True)
