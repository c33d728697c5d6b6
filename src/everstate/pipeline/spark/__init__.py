"""Spark and the log: the session, reading known ranges, parsing records, progress of jobs."""
