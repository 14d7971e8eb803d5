"""Encoders by name."""
