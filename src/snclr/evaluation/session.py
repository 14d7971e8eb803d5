"""The session of an evaluation: device, ranks, stop flag, cached features and recorded results."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from snclr.checkpoint.encoder_file import load_encoder
from snclr.checkpoint.run_dir import RunDir, open_run
from snclr.data.datasets.base import ImageDataset, Labels
from snclr.data.open_on_ranks import open_on_all_ranks
from snclr.data.splits import open_splits
from snclr.distributed.collectives import (
    broadcast_object,
    check_equal_across_ranks,
    is_distributed,
    long_barrier,
    name_missing_ranks,
    raise_on_all_ranks,
    rank_and_size,
)
from snclr.errors import OtherRankError, UserError
from snclr.evaluation.feature_store import open_store
from snclr.evaluation.features import Features, extract_features
from snclr.evaluation.results import append_result
from snclr.evaluation.state import EVALUATION, EvalState, raise_if_stop_requested
from snclr.io.atomic import explain_unwritable
from snclr.io.hashing import weights_digest
from snclr.models.encoders import EncoderSpec
from snclr.runtime.device import pick_device
from snclr.runtime.stop import StopFlag, StopRequested
from snclr.train.config import read_config

Opened = TypeVar("Opened")


@dataclass(frozen=True)
class Session:
    """Where an evaluation runs; the same object on every rank except for `quiet` and `is_rank_zero`."""

    device: str
    stop: StopFlag
    quiet: bool
    """Always True on ranks above 0."""
    is_rank_zero: bool
    """Whether this rank writes files and prints."""
    cache: bool
    """Whether features are read from and written to the run directory."""

    def open(self, opening: Callable[[], Opened]) -> Opened:
        """Call `opening` on every rank; an error on one rank is raised on all, a stop raises StopRequested."""
        raise_if_stop_requested(self.stop)
        return open_on_all_ranks(opening)

    def features(
        self, run: str | Path, encoder: nn.Module, dataset: ImageDataset, *, image_size: int, role: str = "encoder",
        workers: int = 0, labels: Labels | None = None, description: str = "features", batch_size: int = 128,
    ) -> Features:  # fmt: skip
        """Extract the features of a dataset with a network of the run, or read them from the run's cache."""
        check_equal_across_ranks(dataset.fingerprint, f"images in {dataset.name}")
        store = None
        if self.cache:
            store = open_store(run, role, encoder.state_dict(), dataset, image_size=image_size, device=self.device)
        return extract_features(
            encoder, dataset, image_size=image_size, batch_size=batch_size, workers=workers, device=self.device,
            labels=labels, description=description, store=store, stop=self.stop, quiet=self.quiet,
        )  # fmt: skip

    def state(self, run: str | Path, name: str, identity: dict[str, Any]) -> EvalState:
        """Return the resumable state of a long evaluation."""
        return EvalState(Path(run) / EVALUATION, name, identity)

    def record(self, run: str | Path, kind: str, numbers: Any, protocol: str, **facts: Any) -> dict[str, Any]:
        """Append a result to the run's results.jsonl on rank 0 and return the written record on every rank."""
        record: dict[str, Any] = {}
        with raise_on_all_ranks():
            if self.is_rank_zero:
                with explain_unwritable(RunDir(run).results, f"the result was {kind} {dict(numbers)}"):
                    record = append_result(run, kind, numbers, protocol, **facts)
        return broadcast_object(record)


@contextlib.contextmanager
def session(
    *, device: str = "auto", devices: str | int = "1", nodes: int = 1, cache: bool = True, quiet: bool = False
) -> Iterator[Session]:
    """Start the requested ranks, or join those of a launcher, and handle stop signals inside the block."""
    device = _start(device, str(devices), nodes)
    is_rank_zero = rank_and_size()[0] == 0
    with name_missing_ranks(), report_errors_on_rank_zero(), StopFlag() as stop:
        try:
            yield Session(device, stop, quiet or not is_rank_zero, is_rank_zero, cache)
        except StopRequested:  # raised on every rank
            long_barrier()
            raise
        long_barrier()  # no rank exits while another still needs it for a collective


@contextlib.contextmanager
def report_errors_on_rank_zero() -> Iterator[None]:
    """Raise a UserError of any rank on rank 0 and exit with code 2 on the other ranks."""
    try:
        yield
    except UserError as error:
        if rank_and_size()[0] > 0:
            raise SystemExit(2) from None
        if isinstance(error, OtherRankError):  # the command line does not print these
            raise UserError(str(error)) from error
        raise


def _start(device: str, devices: str, nodes: int) -> str:
    """Return the device of this rank, after starting the other ranks if several are requested."""
    if devices != "auto" and not (devices.isdecimal() and int(devices) > 0):
        raise UserError(f"devices is {devices!r}; give a number of processes of at least 1, or auto for all GPUs")
    if nodes < 1:
        raise UserError(f"nodes is {nodes}; give at least 1")
    chosen = pick_device(device)
    if is_distributed():  # a second evaluation in one program
        return f"cuda:{torch.cuda.current_device()}" if chosen.startswith("cuda") else chosen
    launched = any(int(os.environ.get(name, "1")) > 1 for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"))
    if devices == "1" and nodes == 1 and not launched:
        return chosen
    from snclr.distributed.launch import launch

    fabric = launch(accelerator=chosen.partition(":")[0], devices=devices, nodes=nodes)
    return str(fabric.device)


@dataclass(frozen=True)
class EvalTarget:
    """An encoder and the labeled datasets to evaluate it on."""

    run: Path
    encoder: nn.Module
    spec: EncoderSpec
    train: ImageDataset
    test: ImageDataset
    description: str
    device: str

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Weights and images as JSON values: with the settings, they determine an evaluation."""
        return {
            "weights_sha256": weights_digest(self.encoder.state_dict()),
            "encoder": self.spec.to_dict(),
            "train": self.train.fingerprint(),
            "test": self.test.fingerprint(),
        }


def open_target(session: Session, run: str | Path, data: str | None, test: str | None, *, seed: int = 0) -> EvalTarget:
    """Load the run's encoder and open the datasets (default: the run's own); checked to be equal on all ranks."""

    def opening() -> EvalTarget:
        encoder, spec = run_encoder(run)
        train, test_part, description = open_splits(data or data_of(run), test, seed=seed)
        return EvalTarget(Path(run), encoder, spec, train, test_part, description, session.device)

    target = session.open(opening)
    check_equal_across_ranks(lambda: target.identity["weights_sha256"], f"weights in {run}")
    check_equal_across_ranks(lambda: target.identity["train"], "training images")
    check_equal_across_ranks(lambda: target.identity["test"], "test images")
    return target


def run_encoder(run: str | Path) -> tuple[nn.Module, EncoderSpec]:
    """Load the encoder of a complete run."""
    folder = open_run(run)
    if not folder.encoder_weights.is_file():
        raise UserError(
            f"{run} has no {folder.encoder_weights.name}: its training is not complete. Continue it with "
            f"snclr pretrain --resume --out {run}"
        )
    return load_encoder(folder.path)


def data_of(run: str | Path) -> str:
    """Return the dataset a run was trained on, as given to --data."""
    path = RunDir(run).config
    data = read_config(path).get("data") if path.is_file() else None
    if not isinstance(data, str):
        raise UserError(f"{run} does not record which images it was trained on; give --data")
    return data
