"""Rows of a sharded cache on their way into batches."""
