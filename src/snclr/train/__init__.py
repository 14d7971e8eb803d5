"""Pre-training: settings, the trainer and its tasks, optimizers, metrics."""
