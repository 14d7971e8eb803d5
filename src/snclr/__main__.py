"""Run the command line with `python -m snclr`."""

import sys

from snclr.cli.main import main

if __name__ == "__main__":  # data workers import this file too
    sys.exit(main())
