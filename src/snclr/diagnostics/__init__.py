"""Checks of a machine: that training computes what it should on its devices, and how fast."""
