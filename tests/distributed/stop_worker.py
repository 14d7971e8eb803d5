"""The command line; after STEP steps, the last rank sends SIGTERM to itself.

usage: stop_worker.py STEP ARGUMENTS …
"""

import os
import signal
import sys

from snclr.cli.main import main
from snclr.train.pretrain_task import PretrainTask

inner = PretrainTask.training_step
stop_after = 0


def training_step(task, batch):
    result = inner(task, batch)
    if batch.step + 1 == stop_after and int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return result


if __name__ == "__main__":
    stop_after = int(sys.argv[1])
    PretrainTask.training_step = training_step
    sys.exit(main(sys.argv[2:]))
