"""The tables of the paper as studies: their rows, settings and results."""
