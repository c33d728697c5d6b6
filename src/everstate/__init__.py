"""everstate: every state your entities were ever in."""

__version__ = "0.1.0"
