"""Components that several methods share: queue, exact top-k and log-sum-exp, heads, EMA, operations on features."""
