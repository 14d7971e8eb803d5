"""What an encoder is worth: features, kNN, linear classifiers, neighbours. Knows encoders and sources alone.

Accuracies are shares in [0, 1]; each result carries a `protocol` that says how it was measured.
"""
