"""Stores that are a source of truth: each in its database, all with the same interface."""
