"""What a run starts from: its images, given weights, its last checkpoint. The same on every process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch

from snclr.config import PretrainConfig
from snclr.data.sources import Source, open_source
from snclr.data.together import open_together
from snclr.distributed import broadcast_object, broadcast_tensors, same_on_all, together
from snclr.encoders import EncoderSpec
from snclr.errors import UserError
from snclr.export.foreign import read_weights
from snclr.train.checkpoint import Checkpoint, latest_checkpoint
from snclr.train.run_folder import RunFolder

_log = logging.getLogger("snclr")


def open_data(data: str) -> Source:
    """The training images, the same ones on every process."""
    source = open_together(lambda: open_source(data, split="train", download=True))
    same_on_all(source.fingerprint, f"images in {data}")
    return source


def count_classes(source: Source) -> int | None:
    """How many classes the labels have, where there are labels."""
    return None if source.labels is None or len(source.labels) == 0 else int(source.labels.max()) + 1


def initialise(encoders: Sequence[torch.nn.Module], spec: EncoderSpec, init_from: str, *, quiet: bool) -> None:
    """Start from another run or a weights file: every copy gets the weights. What was loaded is said and logged."""
    weights = read_weights(init_from, spec)
    for encoder in encoders:
        encoder.load_state_dict(weights.state)
    _log.info(weights.report)
    if not quiet:
        print(weights.report, file=sys.stderr)
        for text in weights.warnings:
            _warn(text)


def find_checkpoint(folder: RunFolder, fabric: Any) -> Checkpoint | None:
    """The last whole checkpoint, read by process 0 and sent to all: they go on from one state, shared disk or not."""
    found = None
    with together():
        if fabric.is_global_zero:
            found = latest_checkpoint(folder.checkpoints, _warn)
            if found is None and folder.has_checkpoints():
                raise UserError(
                    f"no checkpoint in {folder.checkpoints} can be read, and going on from step 0 would throw the run"
                    " away. Restore one of them (or wait for the disk), or start anew with --overwrite instead of"
                    " --resume."
                )
    facts = broadcast_object(None if found is None else (found.path, found.step, found.info))
    if facts is None:
        return None
    tensors = broadcast_tensors(None if found is None else found.tensors, fabric.device)
    path, step, info = facts
    return Checkpoint(path=path, step=step, tensors=tensors, info=info)


def check_data(checkpoint: Checkpoint, fingerprint: str, config: PretrainConfig) -> None:
    """Refuse to go on with other images than the run began with."""
    if checkpoint.info["data"] != fingerprint:
        raise UserError(
            f"the images of {config.data} are not those the run was trained on (names or number have changed), so it"
            " cannot go on as if nothing had happened. Restore the data, or start a new run with --init-from."
        )


def _warn(text: str) -> None:
    _log.warning(text)
    print(f"warning: {text}", file=sys.stderr)
