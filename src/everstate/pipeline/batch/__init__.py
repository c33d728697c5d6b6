"""Views in batch over the archive: accepted changes, a definition's rows, triggers."""
