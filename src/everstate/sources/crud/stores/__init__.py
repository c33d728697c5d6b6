"""Stores of the REST routes that are not PostgreSQL."""
