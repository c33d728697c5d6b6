"""HTTP: combines the routers of sources and readers into one application."""

from everstate.api.application import create_api as create_api
