"""The command line, and once STEP steps are done a signal from the second process: to itself, or to the one before it.

usage: signal_worker.py STEP self|main SIGNAL NOTES ARGUMENTS OF SNCLR ...

NOTES is a file for the process id of the second process.
"""

import os
import sys
from pathlib import Path

from snclr.cli.main import main
from snclr.train.pretrain_task import PretrainTask

inner = PretrainTask.training_step


def signal_after(step, whom, number, notes):
    def training_step(t, batch):
        result = inner(t, batch)
        if batch.step + 1 == step and os.environ.get("LOCAL_RANK") == "1":
            notes.write_text(str(os.getpid()))
            os.kill(os.getpid() if whom == "self" else os.getppid(), number)
        return result

    PretrainTask.training_step = training_step


if __name__ == "__main__":
    signal_after(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    sys.exit(main(sys.argv[5:]))
