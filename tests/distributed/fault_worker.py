"""The command line with a fault on one rank; run by torchrun or `tests.distributed.launcher.run`.

usage: fault_worker.py slow SECONDS ARGUMENTS …      rank 0 is slow to open the dataset
       fault_worker.py stuck STEP ARGUMENTS …        rank 1 never gets the batch of that step
       fault_worker.py chdir FOLDER ARGUMENTS …      rank 1 works in another folder, like a node without the shared disk
       fault_worker.py killed N ARGUMENTS …          rank 0 is killed in its N-th checkpoint
       fault_worker.py hang SECONDS ARGUMENTS …      rank 1 hangs in an evaluation with that timeout
       fault_worker.py agent 0 ARGUMENTS …           the torchrun agent is killed during an evaluation
       fault_worker.py unreadable N ARGUMENTS …      rank 1 cannot read its N-th image
       fault_worker.py waiting N ARGUMENTS …         rank 1 waits for its N-th image and receives SIGTERM
       fault_worker.py opening 0 ARGUMENTS …         rank 1 receives SIGTERM while it opens its dataset
"""

import itertools
import os
import signal
import sys
import time

from snclr.cli.main import main
from snclr.data.datasets.base import FileDataset
from snclr.data.loader import ViewLoader
from snclr.distributed import launch
from snclr.errors import UserError
from snclr.evaluation import session
from snclr.train import build, trainer

RANK = int(os.environ.get("RANK", "0"))


def delay_opening(seconds: float) -> None:
    inner = build.open_dataset

    def open_dataset(*args, **kwargs):
        time.sleep(seconds)
        return inner(*args, **kwargs)

    build.open_dataset = open_dataset


def hang_at_step(step: int) -> None:
    inner = ViewLoader.batches

    def batches(self, *args):
        for batch in inner(self, *args):
            if batch.step == step:
                hang()
            yield batch

    ViewLoader.batches = batches


def kill_at_checkpoint(checkpoint: int) -> None:
    inner, count = trainer.save_checkpoint, itertools.count(1)

    def save_checkpoint(*args, **kwargs):
        if next(count) == checkpoint:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*args, **kwargs)

    trainer.save_checkpoint = save_checkpoint


def hang(*args, **kwargs) -> None:
    """Sleep until the launcher sends SIGTERM to the other ranks of a failed one."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(600)


def kill_agent() -> None:
    """Rank 0 kills the torchrun agent while both ranks evaluate."""
    inner = session.extract_features

    def extract_features(*args, **kwargs):
        if RANK == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1)
        return inner(*args, **kwargs)

    session.extract_features = extract_features


def fail_at_image(image: int, *, waiting: bool) -> None:
    """Treat the images as remote; the network fails at the N-th image."""
    inner, count = FileDataset.load, itertools.count(1)

    def load(self, *args, **kwargs):
        if next(count) == image:
            if not waiting:
                raise UserError("the network is unreachable")
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            time.sleep(600)
        return inner(self, *args, **kwargs)

    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    FileDataset.load, FileDataset.remote = load, True


def hang_opening() -> None:
    def open_splits(*args, **kwargs):
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        time.sleep(600)

    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    session.open_splits = open_splits


if __name__ == "__main__":
    what, value = sys.argv[1:3]
    if what == "killed" and RANK == 0:
        kill_at_checkpoint(int(value))
    if what == "hang":
        launch.launch.__kwdefaults__["timeout"] = float(value)
        if RANK == 1:
            session.extract_features = hang
    if what == "agent":
        kill_agent()
    if what in ("unreadable", "waiting") and RANK == 1:
        fail_at_image(int(value), waiting=what == "waiting")
    if what == "opening" and RANK == 1:
        hang_opening()
    if what == "slow" and RANK == 0:
        delay_opening(float(value))
    if what == "stuck" and RANK == 1:
        hang_at_step(int(value))
    if what == "chdir" and RANK == 1:
        os.chdir(value)
    sys.exit(main(sys.argv[3:]))
