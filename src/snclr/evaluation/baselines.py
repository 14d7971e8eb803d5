"""Baselines of an accuracy: the same classifier on the features of the untrained encoder and on raw pixels.

    RUN/evaluation/baselines/KEY.json    accuracies; the key is a hash of classifier, features, images and labels

The scores are cached and shared by the runs in one folder. The directory may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from snclr.checkpoint.run_dir import RunDir
from snclr.data.loader import Skip
from snclr.errors import UserError
from snclr.evaluation.feature_store import images_digest
from snclr.evaluation.features import Features
from snclr.evaluation.leakage import split_warnings
from snclr.evaluation.scoring import Score
from snclr.evaluation.session import EvalInputs, Session
from snclr.evaluation.state import EVALUATION, EvalState, short_hash
from snclr.io.atomic import write_atomic
from snclr.models.encoders import EncoderSpec, build_encoder
from snclr.runtime.progress import progress_of
from snclr.train.config import read_config

MAX_IMAGES = 100_000
"""Baselines of more images are computed on request only: each is another pass over them."""
_PIXEL_SIDE = 32  # side of the raw-pixel images: 3,072 values per image
Classify = Callable[[Features, Features, EvalState], Score]
"""Classify test features by training features; the state makes it resumable."""


def record_accuracy(
    session: Session, inputs: EvalInputs, kind: str, score: Score, *, data: str | None, test: str | None,
    unreadable: Sequence[Skip], measure: Callable[[], dict[str, dict[str, Any]]], baselines: bool | None,
    warnings: Sequence[str] = (), **facts: Any,
) -> dict[str, Any]:  # fmt: skip
    """Append an accuracy to results.jsonl, with its baselines (by `measure`) and all warnings; return the record."""
    wanted, omitted = wants_baselines(inputs, baselines)
    measured: dict[str, dict[str, Any]] = {}
    try:
        measured = measure() if wanted else {}
    except UserError as error:  # e.g. a class without readable images, which fine-tuning replaces
        omitted.append(f"no baselines: {error}")
    return session.record(
        kind, score.numbers, score.protocol, **score.context, baselines=measured,
        warnings=[*warnings, *split_warnings(session, inputs, data, test, unreadable), *omitted], **facts,
    )  # fmt: skip


def wants_baselines(inputs: EvalInputs, given: bool | None) -> tuple[bool, list[str]]:
    """Return whether to compute baselines, and a warning if the default omits them."""
    images = len(inputs.train) + len(inputs.test)
    if given is not None or (images <= MAX_IMAGES and not (inputs.train.remote or inputs.test.remote)):
        return given is not False, []
    reason = "the images are remote" if images <= MAX_IMAGES else f"there are more than {MAX_IMAGES:,} images"
    return False, [f"no baselines: {reason}; --baselines computes them"]


def measure_baselines(
    session: Session, inputs: EvalInputs, kind: str, settings: dict[str, Any], classify: Classify,
    *, note: str | None = None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Classify the features of the run's initial encoder and the pixels, or read the cached scores.

    `settings` are the JSON values of the classifier, `note` states how it differs from that of the run. Return the
    fields of a `Baseline` by name.
    """
    config_file = RunDir(session.run).config
    config = read_config(config_file) if config_file.is_file() else {}
    seed, side = int(config.get("seed") or 0), min(inputs.spec.image_size, _PIXEL_SIDE)
    source = config.get("init_from")
    notes = {"untrained encoder": f"random weights; the run started from {source}" if source else None}
    networks = {"untrained encoder": {"encoder": inputs.spec.to_dict(), "seed": seed}, "raw pixels": {"side": side}}
    shared = {"kind": kind, **settings, "data": _data_identity(inputs), "device": torch.device(session.device).type}
    found = {}
    for name, network in networks.items():
        identity = {**shared, "features": network}
        numbers = session.on_rank_zero(functools.partial(_read, session, identity))
        if numbers is None:
            with progress_of(name):
                if name == "raw pixels":  # not cached: decoding is most of their cost, and they are large
                    uncached = replace(session, cache=False)
                    features = inputs.features(uncached, nn.Flatten(), image_size=side, role="pixels")
                else:
                    features = inputs.features(session, initial_encoder(inputs.spec, seed), role="untrained")
                with session.state(f"baseline-{kind}", identity) as state:
                    score = classify(*features, state)
            numbers = {**score.numbers, "standard_error": score.context["standard_error"]}
            session.on_rank_zero(functools.partial(_write, session, identity, numbers))
        found[name] = {**numbers, "note": "; ".join(filter(None, (notes.get(name), note))) or None}
    return found


def initial_encoder(spec: EncoderSpec, seed: int) -> nn.Module:
    """Return the encoder with the weights that a run of this seed starts from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_encoder(spec)


def _data_identity(inputs: EvalInputs) -> list[str]:
    """Return digests of the images and the labels."""
    parts = ((inputs.train, inputs.train_labels), (inputs.test, inputs.test_labels))
    digests = [
        (images_digest(dataset, np.arange(len(dataset))), hashlib.sha256(np.ascontiguousarray(labels).data).hexdigest())
        for dataset, labels in parts
    ]
    return [digest for pair in digests for digest in pair]


def _path(run: Path, identity: dict[str, Any]) -> Path:
    return run / EVALUATION / "baselines" / f"{short_hash(identity)}.json"


def _read(session: Session, identity: dict[str, Any]) -> dict[str, Any] | None:
    """Return cached scores of this run or of another in the same folder; None if there are none."""
    own_path = _path(session.run.resolve(), identity)
    others = session.run.resolve().parent.glob(f"*/{EVALUATION}/baselines/{own_path.name}")
    for path in (own_path, *others) if session.cache else ():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(path.read_bytes())
            if record["identity"] == json.loads(json.dumps(identity)):
                return {name: record[name] for name in ("top1", "top5", "standard_error")}
    return None


def _write(session: Session, identity: dict[str, Any], numbers: dict[str, Any]) -> None:
    if not session.cache:
        return
    path = _path(session.run, identity)
    with contextlib.suppress(OSError, UserError):  # a failure of the cache is not an error
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({**numbers, "identity": identity}, indent=1) + "\n")
