"""HTTP: the routers of the ways in and out, put together into one application."""

from everstate.api.application import create_api

__all__ = ["create_api"]
