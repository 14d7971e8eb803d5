"""`python -m snclr` is `snclr`."""

import sys

from snclr.cli import main

if __name__ == "__main__":  # data workers import this file too
    sys.exit(main())
