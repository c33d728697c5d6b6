"""Proofs of views: what is kept equals its definition, run in batch over the archive."""
