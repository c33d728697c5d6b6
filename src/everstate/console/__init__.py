"""The web console: pages for people, made on the server."""

from everstate.console.router import WebConsole, wants_page

__all__ = ["WebConsole", "wants_page"]
