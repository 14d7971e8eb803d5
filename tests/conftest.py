"""For every test: how threads wait, and what Ctrl-C does."""

import os
import signal

# Waiting threads must not spin long, or tests on a busy machine take far longer (see `snclr.cli`).
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# A test run in the background of a script inherits SIGINT ignored, and so would every process it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
