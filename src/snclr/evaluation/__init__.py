"""Evaluation of encoders: features, kNN, linear classifiers, fine-tuning, detection and retrieval.

Accuracies are in [0, 1]; every result has a `protocol` that states how it was measured.
"""
