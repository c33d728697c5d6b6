"""CRUD over REST: a router for each entity type, on any source of truth that is a `Store`."""
