"""Nearest neighbors of images: search, positiveness, explanation."""
