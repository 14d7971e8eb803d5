"""The HTML report of a run, and figures as PNG files."""
