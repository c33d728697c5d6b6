"""Shared by all HTTP routes: requests, answers, callers, conditions, and their description."""
