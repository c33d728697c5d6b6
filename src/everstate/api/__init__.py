"""HTTP: combines the routers of sources and readers into one application."""

from everstate.api.application import create_api

__all__ = ["create_api"]
