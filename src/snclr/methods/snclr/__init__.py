"""SNCLR: method and loss."""
