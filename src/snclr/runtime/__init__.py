"""The process a command runs in: device, threads, progress, stop signals."""
