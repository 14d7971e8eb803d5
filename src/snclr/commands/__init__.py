"""One file a command: a function with the flags' names, and the flags."""
