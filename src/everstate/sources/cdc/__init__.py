"""Capturing other people's databases: declarations, message shapes, and what makes changes."""
