"""Figures as PNG files."""
