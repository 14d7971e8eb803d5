"""For every test: waiting threads must not spin long, or tests on a busy machine take far longer (see `snclr.cli`)."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")
