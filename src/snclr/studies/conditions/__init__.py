"""Equal conditions of a comparison: budget, tuning, and test images that are not trained on."""
