"""Trained encoders in the forms other software reads: one format a file."""
