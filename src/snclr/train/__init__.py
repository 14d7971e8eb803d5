"""Pre-training: settings to parts, the loop, and what makes a run survive."""
