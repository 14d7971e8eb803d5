"""What a detector starts from: a run's encoder, new weights, or a weights file. The rows of the paper's table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from snclr.encoders import EncoderSpec, build_encoder, resolve_encoder
from snclr.errors import UserError
from snclr.export.encoder import WEIGHTS_NAME, load_encoder, weights_digest
from snclr.export.foreign import read_weights

RUN, RANDOM = "run", "random"
_IMAGE_SIZE = 224  # of an encoder given by name: decides its stem, which is the standard one


@dataclass(frozen=True)
class Start:
    """An encoder to build a detector on, and where its weights come from."""

    encoder: nn.Module
    spec: EncoderSpec
    tag: str
    """"run", "random" or "file"."""
    words: str
    sha256: str


def open_start(run: Path, init: str, encoder: str | None, seed: int) -> Start:
    """The encoder of the run folder, or one given by name, with the weights that `init` asks for."""
    if encoder is not None and init == RUN:
        raise UserError(f"--encoder {encoder} is for --init {RANDOM} or --init FILE; a run has an encoder of its own")
    if encoder is not None:
        loaded, spec = None, resolve_encoder(encoder, image_size=_IMAGE_SIZE)
    elif (run / WEIGHTS_NAME).is_file() or init == RUN:
        loaded, spec = load_encoder(run)
    else:
        raise UserError(
            f"{run} holds no encoder whose architecture could be taken; give one by name, such as --encoder resnet50"
        )
    if init == RUN:
        assert loaded is not None
        return Start(loaded, spec, RUN, f"the weights of {run}", weights_digest(loaded.state_dict()))
    torch.manual_seed(seed + 1_000_003)  # not the numbers that the heads get
    made = build_encoder(spec)
    if init == RANDOM:
        return Start(made, spec, RANDOM, f"random weights (seed {seed})", weights_digest(made.state_dict()))
    made.load_state_dict(read_weights(init, spec).state)
    return Start(made, spec, "file", f"the weights of {init}", weights_digest(made.state_dict()))
