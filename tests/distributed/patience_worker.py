"""Run by torchrun: the command line, on processes that are not all alike.

usage: patience_worker.py slow SECONDS ARGUMENTS …    the first process of the machine is slow to open the images
       patience_worker.py stuck STEP ARGUMENTS …      the second never gets the batch of that step
       patience_worker.py apart FOLDER ARGUMENTS …    the second works in another folder, and so sees no run, or another
       patience_worker.py killed N ARGUMENTS …        the first is killed in its N-th checkpoint
       patience_worker.py silent SECONDS ARGUMENTS …  the second falls silent in an evaluation, which has that timeout
       patience_worker.py deserted 0 ARGUMENTS …      the agent is killed while an evaluation waits for the second
       patience_worker.py unreadable N ARGUMENTS …    the second cannot read its N-th image
       patience_worker.py waiting N ARGUMENTS …       the second waits for it, and is then asked to stop
       patience_worker.py opening 0 ARGUMENTS …       the second waits for its images to open, and is asked to stop
"""

import itertools
import os
import signal
import sys
import time

from snclr.cli import main
from snclr.data import splits
from snclr.data.loader import ViewLoader
from snclr.data.sources import FileSource
from snclr.errors import UserError
from snclr.evaluate import features
from snclr.train import inputs, pretrain, watch

RANK = int(os.environ.get("RANK", "0"))


def open_slowly(seconds: float) -> None:
    inner = inputs.open_source

    def open_source(*args, **kwargs):
        time.sleep(seconds)
        return inner(*args, **kwargs)

    inputs.open_source = open_source


def stick_at(step: int) -> None:
    inner = ViewLoader.batches

    def batches(self, *args):
        for batch in inner(self, *args):
            if batch.step == step:
                time.sleep(600)
            yield batch

    ViewLoader.batches = batches


def die_saving(checkpoint: int) -> None:
    inner, count = pretrain.save_checkpoint, itertools.count(1)

    def save_checkpoint(*args, **kwargs):
        if next(count) == checkpoint:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*args, **kwargs)

    pretrain.save_checkpoint = save_checkpoint


def fall_silent() -> None:
    def show_no_life(self):
        return

    def hang(*args, **kwargs):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(600)

    watch.Watch._talk = show_no_life
    features.extract_features = hang


def desert() -> None:
    """The first process kills their agent where the second does not come on."""
    inner = features.extract_features

    def extract_features(*args, **kwargs):
        if RANK == 0:
            os.kill(os.getppid(), signal.SIGKILL)
            return inner(*args, **kwargs)
        return time.sleep(600)

    features.extract_features = extract_features


def fail_at(image: int, *, waiting: bool) -> None:
    """The images are read as if they came from a network, which is away when the N-th is asked for."""
    inner, count = FileSource.load, itertools.count(1)

    def load(self, *args, **kwargs):
        if next(count) == image:
            if not waiting:
                raise UserError("the network is away")
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            time.sleep(600)
        return inner(self, *args, **kwargs)

    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    FileSource.load, FileSource.remote = load, True


def open_never() -> None:
    def open_splits(*args, **kwargs):
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        time.sleep(600)

    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    splits.open_splits = open_splits


if __name__ == "__main__":
    what, value = sys.argv[1:3]
    if what == "killed" and RANK == 0:
        die_saving(int(value))
    if what == "silent":
        watch.TIMEOUT_SECONDS = float(value)
        if RANK == 1:
            fall_silent()
    if what == "deserted":
        desert()
    if what in ("unreadable", "waiting") and RANK == 1:
        fail_at(int(value), waiting=what == "waiting")
    if what == "opening" and RANK == 1:
        open_never()
    if what == "slow" and RANK == 0:
        open_slowly(float(value))
    if what == "stuck" and RANK == 1:
        stick_at(int(value))
    if what == "apart" and RANK == 1:
        os.chdir(value)
    sys.exit(main(sys.argv[3:]))
