"""Derived topics: accepted changes in another form, in their own topics (decision 23)."""
