"""The public functions of the package, one per command."""
