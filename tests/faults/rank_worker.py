"""One rank under torchrun: an `snclr` command with faults, that leaves its process id and exit code for the trial.

usage: rank_worker.py FOLDER FAULTS(JSON) ARGUMENTS OF SNCLR …
"""

import json
import os
import sys
from pathlib import Path

from tests.faults import inject

if __name__ == "__main__":
    me = Path(sys.argv[1]) / f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}"
    me.with_suffix(".pid").write_text(str(os.getpid()))
    for fault in json.loads(sys.argv[2]):
        getattr(inject, fault.pop("name"))(**fault)
    from snclr.cli import main

    code = main(sys.argv[3:])
    me.with_suffix(".code").write_text(str(code))
    sys.exit(code)
