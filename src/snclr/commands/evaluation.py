"""What the evaluating commands share: their flags, the run's encoder, the data, processes, stops and results."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import nn

    from snclr.data.sources import Labels, Source
    from snclr.encoders import EncoderSpec
    from snclr.evaluate.features import Features
    from snclr.evaluate.resume import Interrupted, Kept
    from snclr.train.signals import StopRequest

Opened = TypeVar("Opened")

_TORCHRUN, _SRUN = "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"  # more than 1: a launcher has started several processes


def add_common_flags(parser: argparse.ArgumentParser, *, cache: bool = True) -> None:
    """RUN, --data, --test and where to compute."""
    parser.add_argument("run", metavar="RUN", help="a run folder, the --out of snclr pretrain")
    parser.add_argument(
        "--data", help="labelled images: a folder, a list, shards, a data set by name (default: the run's own)"
    )
    parser.add_argument(
        "--test", help="the test images, where they are apart (default: the set's own test part, or a fifth)"
    )
    add_compute_flags(parser, cache=cache)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of splits and training")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def add_compute_flags(parser: argparse.ArgumentParser, *, cache: bool = True) -> None:
    """Where and by how many processes to compute; with `cache`, whether features are kept."""
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes that decode images")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 or mps")
    parser.add_argument(
        "--devices", default="1", metavar="N", help="processes that share the work, one a GPU; auto: all GPUs here"
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines that share the work")
    if cache:
        parser.add_argument(
            "--no-cache", action="store_true", help="neither use nor keep features in RUN/evaluation/features"
        )


@dataclass(frozen=True)
class Session:
    """Where a command computes: device, other processes, the stop a person may ask for."""

    device: str
    stop: StopRequest
    quiet: bool
    """True on every process but the first, too."""
    first: bool
    """Whether this process is the one that writes files and prints."""
    cache: bool

    def open(self, opening: Callable[[], Opened]) -> Opened:
        """What the call opens, on every process; a stop ends it with Interrupted. Errors of one are those of all."""
        from snclr.data.patience import Stopped
        from snclr.data.together import open_together
        from snclr.evaluate.resume import Interrupted, stop_together

        stop_together(self.stop)
        try:
            return open_together(opening)
        except Stopped as stop:
            raise Interrupted(signal.Signals[str(stop)]) from None

    def features(
        self, run: str | Path, encoder: nn.Module, source: Source, *, image_size: int, role: str = "encoder",
        workers: int = 0, labels: Labels | None = None, description: str = "features", batch_size: int = 128,
    ) -> Features:  # fmt: skip
        """Features of a source by a network of the run, kept in the run folder unless that is not wanted."""
        from snclr.distributed import same_on_all
        from snclr.evaluate.feature_store import open_store
        from snclr.evaluate.features import extract_features

        same_on_all(source.fingerprint, f"images in {source.name}")
        store = None
        if self.cache:
            store = open_store(run, role, encoder.state_dict(), source, image_size=image_size, device=self.device)
        return extract_features(
            encoder, source, image_size=image_size, batch_size=batch_size, workers=workers, device=self.device,
            labels=labels, description=description, store=store, stop=self.stop, quiet=self.quiet,
        )  # fmt: skip

    def kept(self, run: str | Path, name: str, identity: dict[str, Any]) -> Kept:
        """The state of a long evaluation between two calls."""
        from snclr.evaluate.resume import EVALUATION, Kept

        return Kept(Path(run) / EVALUATION, name, identity)

    def record(self, run: str | Path, kind: str, numbers: Any, protocol: str, **facts: Any) -> dict[str, Any]:
        """Add a result to the run's results.jsonl, once; every process gets it."""
        from snclr.distributed import broadcast_object, fail_together
        from snclr.errors import UserError
        from snclr.evaluate.results import append_result

        written: dict[str, Any] = {}
        failure: UserError | None = None
        if self.first:
            try:
                written = append_result(run, kind, numbers, protocol, **facts)
            except UserError as error:
                failure = error
            except OSError as error:
                failure = UserError(f"cannot write the result to {run} ({error.strerror}): {kind} {dict(numbers)}")
        fail_together(failure)
        return broadcast_object(written)

    def stopped(self, kind: str, error: Interrupted, **facts: Any) -> dict[str, Any]:
        """What a command returns that was stopped."""
        self.stop.request(error.signal)
        found = {"kind": kind, "complete": False, "stopped_by": error.signal.name, "exit_code": self.stop.exit_code}
        return {**found, "first": self.first, **facts}


@contextlib.contextmanager
def session(
    *, device: str = "auto", devices: str | int = "1", nodes: int = 1, cache: bool = True, quiet: bool = False
) -> Iterator[Session]:
    """Start the processes that were asked for, or join those a launcher started, and catch stops inside the block."""
    from snclr.distributed import meet, rank_and_size
    from snclr.train.signals import StopRequest
    from snclr.train.watch import TIMEOUT_SECONDS, watched

    device = _start(device, str(devices), nodes)
    first = rank_and_size()[0] == 0
    with one_voice(), watched(TIMEOUT_SECONDS), StopRequest() as stop:
        yield Session(device, stop, quiet or not first, first, cache)
        meet()  # none leaves while another still needs it


@contextlib.contextmanager
def one_voice() -> Iterator[None]:
    """Let the first process alone say what went wrong in the block, also where that was on another."""
    from snclr.distributed import rank_and_size
    from snclr.errors import OtherProcessError, UserError

    try:
        yield
    except UserError as error:
        if rank_and_size()[0] > 0:
            raise SystemExit(2) from None
        if isinstance(error, OtherProcessError):  # which the command line would leave to that other
            raise UserError(str(error)) from error
        raise


def _start(device: str, devices: str, nodes: int) -> str:
    """The device of this process, after starting others where they were asked for."""
    import torch

    from snclr.devices import pick_device
    from snclr.distributed import is_distributed
    from snclr.errors import UserError

    if devices != "auto" and not (devices.isdecimal() and int(devices) > 0):
        raise UserError(f"devices is {devices!r}; give a number of processes of at least 1, or auto for all GPUs")
    if nodes < 1:
        raise UserError(f"nodes is {nodes}; at least one machine is needed")
    launched = any(int(os.environ.get(name, "1")) > 1 for name in (_TORCHRUN, _SRUN))
    chosen = pick_device(device)
    if is_distributed():  # a second evaluation of one program
        return f"cuda:{torch.cuda.current_device()}" if chosen.startswith("cuda") else chosen
    if devices == "1" and nodes == 1 and not launched:
        return chosen
    from snclr.train.launch import start

    fabric = start(accelerator=chosen.partition(":")[0], devices=devices, nodes=nodes)
    return str(fabric.device)


@dataclass(frozen=True)
class Subject:
    """An encoder to evaluate and what to evaluate it on."""

    run: Path
    encoder: nn.Module
    spec: EncoderSpec
    train: Source
    test: Source
    words: str
    device: str

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """What decides an evaluation, besides its settings: weights and images, as JSON values."""
        from snclr.export.encoder import weights_digest

        return {
            "weights_sha256": weights_digest(self.encoder.state_dict()),
            "encoder": self.spec.to_dict(),
            "train": self.train.fingerprint(),
            "test": self.test.fingerprint(),
        }


def open_subject(at: Session, run: str | Path, data: str | None, test: str | None, *, seed: int = 0) -> Subject:
    """Load the run's encoder and open its data, or the data given: the same on every process."""
    from snclr.data.splits import open_splits
    from snclr.distributed import same_on_all

    def opening() -> Subject:
        encoder, spec = run_encoder(run)
        train, tested, words = open_splits(data or data_of(run), test, seed=seed)
        return Subject(Path(run), encoder, spec, train, tested, words, at.device)

    subject = at.open(opening)
    same_on_all(lambda: subject.identity["weights_sha256"], f"weights in {run}")
    same_on_all(lambda: subject.identity["train"], "training images")
    same_on_all(lambda: subject.identity["test"], "test images")
    return subject


def run_encoder(run: str | Path) -> tuple[nn.Module, EncoderSpec]:
    """The encoder of a complete run; what is missing, and what to do, where it is not one."""
    from snclr.errors import UserError
    from snclr.export.encoder import load_encoder
    from snclr.train.run_folder import open_run

    folder = open_run(run)
    if not folder.encoder_weights.is_file():
        raise UserError(
            f"{run} has no {folder.encoder_weights.name} yet: its training is not complete. Go on with "
            f"snclr pretrain --resume --out {run}"
        )
    return load_encoder(folder.path)


def data_of(run: str | Path) -> str:
    """The images a run was trained on."""
    from snclr.errors import UserError
    from snclr.train.run_folder import RunFolder
    from snclr.train.saved_run import read_config

    path = RunFolder(run).config
    data = read_config(path).get("data") if path.is_file() else None
    if not isinstance(data, str):
        raise UserError(f"{run} does not say which images it was trained on; give --data")
    return data


def finish(found: dict[str, Any], a: argparse.Namespace, show_found: Callable[[dict[str, Any], bool], None]) -> int:
    """Print what a command returned, on the first process, and give its exit code."""
    from snclr.distributed import rank_and_size

    if found.get("complete", True):
        if rank_and_size()[0] == 0:
            show_found(found, a.json)
        return 0
    if found.pop("first", True):
        if a.json:
            print(json.dumps(found))
        kept = "what was done is kept" if not getattr(a, "no_cache", False) else "features were not kept (--no-cache)"
        if "step" in found:
            kept = f"after step {found['step']} of {found['total_steps']}; everything is saved"
        print(
            f"stopped by {found['stopped_by']}{' ' if 'step' in found else ': '}{kept}. Go on with the same command:\n"
            f"  {same_command(a)}",
            file=sys.stderr,
        )
    return int(found["exit_code"])


def same_command(a: argparse.Namespace) -> str:
    """The command as it was given, with its defaults, to be pasted."""
    words = ["snclr", a.handler.__module__.rpartition(".")[2]]
    flags = []
    for name, value in vars(a).items():
        flag = f"--{name.replace('_', '-')}"
        if name in ("run", "image") or isinstance(value, list):
            words += [str(item) for item in value] if isinstance(value, list) else [str(value)]
        elif value is True:
            flags.append(flag)
        elif value is not None and value is not False and name != "handler":  # 0 is a value too
            flags.append(f"{flag}={value}")
    return shlex.join([*words, *flags])


def show(record: dict[str, Any], as_json: bool) -> None:
    """Print a result with the protocol that gives it its meaning."""
    if as_json:
        print(json.dumps(record))
        return
    numbers = record["numbers"]
    words = {"top1": "top-1", "top5": "top-5"}
    found = ", ".join(f"{words[name]} {numbers[name]:.2%}" for name in words if numbers.get(name) is not None)
    print(f"{record['kind']}: {found}\n  {record['protocol']}")
    if record.get("skipped"):
        count = record["skipped"] if isinstance(record["skipped"], int) else len(record["skipped"])
        print(f"  {count} images could not be read and were left out")
