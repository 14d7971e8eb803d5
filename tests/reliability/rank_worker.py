"""One rank under torchrun: an `snclr` command with faults, that leaves notes for the trial.

They are its process id, its exit code, and the last step that an earlier attempt had done when this one began.

usage: rank_worker.py FOLDER RUN FAULTS(JSON) ARGUMENTS OF SNCLR …
"""

import json
import os
import sys
from pathlib import Path

from tests.reliability import inject
from tests.reliability.harness import last_step

if __name__ == "__main__":
    me = Path(sys.argv[1]) / f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}"
    me.with_suffix(".pid").write_text(str(os.getpid()))
    me.with_suffix(".done").write_text(str(last_step(Path(sys.argv[2]))))
    for fault in json.loads(sys.argv[3]):
        getattr(inject, fault.pop("name"))(**fault)
    from snclr.cli.main import main

    code = main(sys.argv[4:])
    me.with_suffix(".code").write_text(str(code))
    sys.exit(code)
