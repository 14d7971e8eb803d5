"""`compare` and `ablate`: methods or settings × seeds, trained in subprocesses and summarized in a table."""
