"""The archive: copying the log to the lake, proving the copy complete, compaction, replay."""
