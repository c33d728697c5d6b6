"""Drift: the log's newest state of each entity beside the source of truth."""
