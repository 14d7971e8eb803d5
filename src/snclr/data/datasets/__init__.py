"""Datasets: folders, lists, built-in sets, Hugging Face, demo images."""
