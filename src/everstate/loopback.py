"""Addresses that only this machine can reach."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(value: str) -> str:
    """A Host header without its port; a malformed header gives a name that never matches."""
    try:
        return urlsplit(f"//{value}").hostname or ""
    except ValueError:
        return ""
