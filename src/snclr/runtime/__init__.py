"""The process a command runs in: device, memory, progress, stop signals, settings, results."""
