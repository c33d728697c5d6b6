"""The web console: pages for people, made on the server."""

from everstate.console.router import WebConsole as WebConsole
from everstate.console.router import wants_page as wants_page
