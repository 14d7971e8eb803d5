"""What the evaluating commands share: their flags, the run's encoder, and the two parts of the data."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from snclr.data.sources import Source
    from snclr.encoders import EncoderSpec


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """RUN, --data, --test and where to compute."""
    parser.add_argument("run", metavar="RUN", help="a run folder, the --out of snclr pretrain")
    parser.add_argument(
        "--data", help="labelled images: a folder, a list file, a built-in name (default: the run's own)"
    )
    parser.add_argument(
        "--test", help="the test images, where they are apart (default: the set's own test part, or a fifth)"
    )
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes that decode images")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of splits and training")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


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


def open_subject(
    run: str | Path, data: str | None, test: str | None, *, device: str = "auto", seed: int = 0
) -> Subject:
    """Load the run's encoder and open its data, or the data given."""
    from snclr.data.splits import open_splits
    from snclr.export.encoder import load_encoder

    encoder, spec = load_encoder(Path(run))
    train, tested, words = open_splits(data or data_of(run), test, seed=seed)
    return Subject(Path(run), encoder, spec, train, tested, words, pick_device(device))


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


def pick_device(device: str) -> str:
    """`auto` is a GPU where there is one."""
    import torch

    from snclr.errors import UserError

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device {device} was asked for, but torch sees no CUDA device; give --device cpu or auto")
    try:
        return str(torch.device(device))
    except RuntimeError as error:
        raise UserError(f"there is no device {device!r}; give auto, cpu or cuda") from error


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
        print(f"  {record['skipped']} images could not be read and were left out")
