"""Runs a program that refuses to run as root, when this process is root.

First choice: a user namespace in which root is mapped to ``nobody``; files keep their owner. Where
that is forbidden (many containers): the real user ``nobody``, which gets the ownership of the
server's folder, and one capability to search folders that it could not access otherwise.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from everstate.errors import LocalStackError

_NOBODY = 65534
_CAPABILITY = "+dac_override"


def prefix(owned: Path) -> tuple[str, ...]:
    """Prefix for a command that writes into ``owned``; empty when this process is not root."""
    if os.geteuid() != 0:
        return ()
    if namespaces_work():
        _own(owned, 0)
        return _namespace()
    if shutil.which("setpriv") is None:
        raise LocalStackError(
            "PostgreSQL refuses to run as root, and neither unshare nor setpriv works on this "
            "machine.",
            advice="Run everstate as another user, or set store.dsn to a server of your own.",
        )
    _own(owned, _NOBODY)
    nobody = (f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups")
    capability = (f"--inh-caps={_CAPABILITY}", f"--ambient-caps={_CAPABILITY}")
    # Without this bit access(2), with which PostgreSQL finds its programs, ignores the capability.
    return ("setpriv", *nobody, *capability, "--securebits=+no_setuid_fixup")


@cache
def namespaces_work() -> bool:
    """True when this system allows this process to create a user namespace."""
    if shutil.which("unshare") is None:
        return False
    done = subprocess.run((*_namespace(), "true"), capture_output=True, check=False)
    return done.returncode == 0


def _namespace() -> tuple[str, ...]:
    return ("unshare", "--user", f"--map-user={_NOBODY}", f"--map-group={_NOBODY}")


def _own(folder: Path, user: int) -> None:
    """Make ``user`` the owner of the folder and its contents, if it is not yet."""
    if not folder.exists() or folder.stat().st_uid == user:
        return
    for parent, _folders, files in os.walk(folder):
        os.chown(parent, user, user)
        for name in files:
            os.chown(os.path.join(parent, name), user, user, follow_symlinks=False)
