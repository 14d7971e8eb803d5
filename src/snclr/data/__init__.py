"""Data, left to right: source → order → decode → views → loader. Nothing here knows about training."""
