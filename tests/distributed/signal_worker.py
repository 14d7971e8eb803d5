"""The command line; after STEP steps, rank 1 sends a signal to itself or to rank 0, which started it.

usage: signal_worker.py STEP self|rank0 SIGNAL PID_FILE ARGUMENTS …

Rank 1 writes its process id to PID_FILE.
"""

import os
import sys
from pathlib import Path

from snclr.cli.main import main
from snclr.train.pretrain_task import PretrainTask

inner = PretrainTask.training_step


def signal_after(step, target, number, pid_file):
    def training_step(task, batch):
        result = inner(task, batch)
        if batch.step + 1 == step and os.environ.get("LOCAL_RANK") == "1":
            pid_file.write_text(str(os.getpid()))
            os.kill(os.getpid() if target == "self" else os.getppid(), number)
        return result

    PretrainTask.training_step = training_step


if __name__ == "__main__":
    signal_after(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    sys.exit(main(sys.argv[5:]))
