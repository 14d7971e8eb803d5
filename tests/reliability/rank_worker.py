"""One rank under torchrun: an `snclr` command with faults.

It writes files for the trial to FOLDER, named RESTART-RANK: .pid (process id), .step (last step of earlier attempts),
and .code (exit code).

usage: rank_worker.py FOLDER RUN FAULTS(JSON) ARGUMENTS …
"""

import json
import os
import sys
from pathlib import Path

from tests.reliability import inject
from tests.reliability.harness import last_step

if __name__ == "__main__":
    record = Path(sys.argv[1]) / f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}"
    record.with_suffix(".pid").write_text(str(os.getpid()))
    record.with_suffix(".step").write_text(str(last_step(Path(sys.argv[2]))))
    for fault in json.loads(sys.argv[3]):
        getattr(inject, fault.pop("name"))(**fault)
    from snclr.cli.main import main

    code = main(sys.argv[4:])
    record.with_suffix(".code").write_text(str(code))
    sys.exit(code)
