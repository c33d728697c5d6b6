"""CRUD over REST: a router for each entity type, over any source of truth that is a `Store`."""
