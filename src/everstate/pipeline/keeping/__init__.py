"""Keeping views: the keeper, views that catch up, building and publishing their versions."""
