"""Transforms: crops, color, views."""
