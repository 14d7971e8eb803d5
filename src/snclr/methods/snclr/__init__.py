"""SNCLR: method, loss, queue and kernels."""
