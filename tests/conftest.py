"""For every test: threads that wait must not spin, or tests on a busy machine take many times as long (see `snclr.cli`)."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
