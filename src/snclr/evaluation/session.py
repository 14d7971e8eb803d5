"""The session of an evaluation: run, device, ranks, stop flag, cached features and recorded results."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from snclr.checkpoint.encoder_file import load_encoder
from snclr.checkpoint.run_dir import RunDir, open_run
from snclr.data.datasets.base import ImageDataset, Labels
from snclr.data.open_on_ranks import open_on_all_ranks
from snclr.data.splits import holds_out_test, open_splits
from snclr.distributed.collectives import (
    check_equal_across_ranks,
    is_distributed,
    long_barrier,
    name_missing_ranks,
    rank_and_size,
)
from snclr.errors import OtherRankError, UserError, snclr_command
from snclr.evaluation.features import Features, extract_features
from snclr.evaluation.results import append_result
from snclr.evaluation.scoring import match_labels
from snclr.evaluation.state import EvalState, FeatureStore, ValueT, on_rank_zero, raise_if_stop_requested
from snclr.io.atomic import explain_unwritable
from snclr.io.hashing import weights_digest
from snclr.models.encoders import EncoderSpec
from snclr.runtime.device import pick_device
from snclr.runtime.machine import check_precision
from snclr.runtime.progress import set_status
from snclr.runtime.settings import check_devices
from snclr.runtime.stop import StopFlag, StopRequested
from snclr.train.config import read_config


@dataclass(frozen=True)
class Session:
    """The run under evaluation, its device and options; the same on every rank except `quiet`."""

    run: Path
    device: str
    stop: StopFlag
    quiet: bool
    """Always True on ranks above 0."""
    cache: bool
    """Whether features are read from and written to the run directory."""
    workers: int
    precision: str = "32"
    """Precision of frozen encoders: "32" or "bf16"."""

    def open(self, opening: Callable[[], ValueT]) -> ValueT:
        """Call `opening` on one rank per node, then on the others. Raise errors and StopRequested on all ranks."""
        raise_if_stop_requested(self.stop)
        return open_on_all_ranks(opening)

    def features(
        self, encoder: nn.Module, dataset: ImageDataset, *, image_size: int, role: str = "encoder",
        labels: Labels | None = None, description: str = "features", batch_size: int = 128,
    ) -> Features:  # fmt: skip
        """Extract the features of a dataset with a network of the run, or read them from the run's cache."""
        check_equal_across_ranks(dataset.fingerprint, f"images in {dataset.name}")
        store = None
        if self.cache:
            weights = weights_digest(encoder.state_dict())
            store = FeatureStore(self.run, role, weights, dataset, image_size, self.device, self.precision)
        return extract_features(
            encoder, dataset, image_size=image_size, batch_size=batch_size, workers=self.workers, device=self.device,
            labels=labels, description=description, store=store, stop=self.stop, quiet=self.quiet,
            precision=self.precision,
        )  # fmt: skip

    def state(self, name: str, identity: dict[str, Any]) -> EvalState:
        """Return the resumable state of a long evaluation."""
        other = {} if self.precision == "32" else {"precision": self.precision}
        return EvalState(RunDir(self.run).evaluation, name, {**identity, **other})

    def record(self, kind: str, numbers: dict[str, Any], protocol: str, **facts: Any) -> dict[str, Any]:
        """Append a result to the run's results.jsonl on rank 0 and return the written record on every rank."""

        def append() -> dict[str, Any]:
            if self.precision != "32":
                facts["precision"] = self.precision
            with explain_unwritable(RunDir(self.run).results, f"the result was {kind} {numbers}"):
                return append_result(self.run, kind, numbers, protocol, **facts)

        return on_rank_zero(append)


@contextlib.contextmanager
def open_session(
    run: str | Path, *, workers: int = 0, device: str = "auto", devices: str | int = "1", nodes: int = 1,
    cache: bool = True, quiet: bool = False, precision: str = "32",
) -> Iterator[Session]:  # fmt: skip
    """Start the requested ranks, or join those of a launcher, and handle stop signals inside the block."""
    precision = precision.removesuffix("-mixed")
    if precision not in ("32", "bf16"):
        raise UserError(f"precision is {precision!r}; give 32 or bf16")
    check_precision(pick_device(device), precision)
    device = _start(device, str(devices), nodes)
    quiet = quiet or rank_and_size()[0] > 0
    with name_missing_ranks(), report_errors_on_rank_zero(), StopFlag() as stop:
        try:
            yield Session(Path(run), device, stop, quiet, cache, workers, precision)
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
    check_devices(devices)
    if nodes < 1:
        raise UserError(f"nodes is {nodes}; give at least 1")
    chosen = pick_device(device)
    if is_distributed():  # a second evaluation in one program
        return f"cuda:{torch.cuda.current_device()}" if chosen.startswith("cuda") else chosen
    launched = any(int(os.environ.get(name, "1")) > 1 for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"))
    if devices == "1" and nodes == 1 and not launched:
        return chosen
    from snclr.distributed.launch import launch

    fabric = launch(device=chosen.partition(":")[0], devices=devices, nodes=nodes)
    return str(fabric.device)


@dataclass(frozen=True)
class EvalInputs:
    """What an evaluation takes: an encoder, training and test images, their labels (n,) in one numbering."""

    encoder: nn.Module
    spec: EncoderSpec
    train: ImageDataset
    test: ImageDataset
    train_labels: Labels
    test_labels: Labels
    description: str
    """The datasets, for the protocol."""
    held_out: bool
    """Whether the test images are a held-out part of the data, as there are no separate ones."""

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Weights and images as JSON values: with the settings, they determine an evaluation."""
        return {
            "weights_sha256": weights_digest(self.encoder.state_dict()),
            "encoder": self.spec.to_dict(),
            "train": self.train.fingerprint(),
            "test": self.test.fingerprint(),
        }

    def features(
        self, session: Session, encoder: nn.Module | None = None, *, image_size: int | None = None,
        role: str = "encoder",
    ) -> tuple[Features, Features]:  # fmt: skip
        """Return the features of the training and the test images by the run's encoder or another network."""
        extract = functools.partial(
            session.features, encoder or self.encoder, image_size=image_size or self.spec.image_size, role=role
        )
        train = extract(self.train, labels=self.train_labels, description="training features")
        return train, extract(self.test, labels=self.test_labels, description="test features")


def open_inputs(session: Session, data: str | None, test: str | None, *, seed: int) -> EvalInputs:
    """Load the run's encoder and open the datasets (default: the run's own); checked to be equal on all ranks."""

    def opening() -> EvalInputs:
        set_status(f"loading {session.run}")
        encoder, spec = run_encoder(session.run)
        source = data or data_of(session.run)
        train_part, test_part, description = open_splits(source, test, seed=seed)
        labels = match_labels(train_part, test_part)
        return EvalInputs(encoder, spec, train_part, test_part, *labels, description, holds_out_test(source, test))

    inputs = session.open(opening)
    check_equal_across_ranks(lambda: inputs.identity["weights_sha256"], f"weights in {session.run}")
    check_equal_across_ranks(lambda: inputs.identity["train"], "training images")
    check_equal_across_ranks(lambda: inputs.identity["test"], "test images")
    return inputs


def run_encoder(run: str | Path) -> tuple[nn.Module, EncoderSpec]:
    """Load the encoder of a complete run."""
    folder = open_run(run)
    if not folder.encoder_weights.is_file():
        raise UserError(
            f"{run} has no {folder.encoder_weights.name}: its training is not complete. Continue it with "
            + snclr_command("pretrain", "--resume", "--out", run)
        )
    return load_encoder(folder.path)


def data_of(run: str | Path) -> str:
    """Return the dataset a run was trained on, as given to --data."""
    path = RunDir(run).config
    data = read_config(path).get("data") if path.is_file() else None
    if not isinstance(data, str):
        raise UserError(f"{run} does not record which images it was trained on; give --data")
    return data
