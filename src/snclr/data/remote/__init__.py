"""Remote files: open, retry, cache."""
