"""Figures and pages from what a run and its evaluations left."""
