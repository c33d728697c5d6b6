"""Handlers: functions of a project's own, called for each accepted change in groups."""
