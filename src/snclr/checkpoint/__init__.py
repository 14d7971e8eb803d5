"""Checkpoints, run directories and encoder files."""
