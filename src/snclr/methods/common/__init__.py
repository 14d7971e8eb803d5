"""Components that several methods share: heads, EMA, operations on features."""
