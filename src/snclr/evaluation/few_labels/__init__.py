"""Evaluation with few labels: which images are labeled, and the nearest of them."""
