"""Record an accuracy with its baselines: the same classifier on features of the untrained encoder and on raw pixels.

    RUN/evaluation/baselines/KEY.json    accuracies; the key is a hash of classifier, features, images and labels

The scores are cached and shared by the runs in one folder. The directory may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from snclr.checkpoint.run_dir import RunDir
from snclr.errors import UserError
from snclr.evaluation.features import Features
from snclr.evaluation.results import AccuracyResult
from snclr.evaluation.scoring import Score
from snclr.evaluation.session import EvalInputs, Session
from snclr.evaluation.state import EvalState, images_digest, on_rank_zero, short_hash
from snclr.evaluation.trained_on import split_warnings
from snclr.io.atomic import write_atomic
from snclr.io.hashing import sha256_bytes
from snclr.models.encoders import EncoderSpec, build_encoder
from snclr.runtime.progress import progress_of
from snclr.train.config import read_config

MAX_IMAGES = 100_000
"""Baselines of more images are computed on request only: each is another pass over them."""
_PIXEL_SIDE = 32  # side of the raw-pixel images: 3,072 values per image
ScoreT = TypeVar("ScoreT", bound=Score)
ResultT = TypeVar("ResultT", bound=AccuracyResult)
Classify = Callable[[Features, Features, "EvalState | None"], Score]
"""Classify test features by training features; the state makes it resumable."""


def classifier_of(
    classifier: Callable[..., ScoreT], session: Session, inputs: EvalInputs, **settings: Any
) -> Callable[[Features, Features, EvalState | None], ScoreT]:
    """Return `knn`, `few_shot` or `linear_cached` with these settings, for features of the inputs by any network."""

    def classify(train: Features, test: Features, state: EvalState | None) -> ScoreT:
        score = classifier(
            train.features, train.labels, test.features, test.labels, data=inputs.description, device=session.device,
            state=state, stop=session.stop, quiet=session.quiet, **settings,
        )  # fmt: skip
        return replace(score, skipped=[*train.skipped, *test.skipped])

    return classify


def record_accuracy(
    result: type[ResultT], session: Session, inputs: EvalInputs, kind: str, score: Score, classify: Classify,
    settings: dict[str, Any], /, *, baselines: bool | None, note: str | None = None, warnings: Sequence[str] = (),
    **facts: Any,
) -> ResultT:  # fmt: skip
    """Append an accuracy to results.jsonl, with its baselines and all warnings; return the record as a `result`.

    `classify` and `settings` are those of the baselines (see `measure_baselines`).
    """
    images, found = len(inputs.train) + len(inputs.test), {}
    reason = "the images are remote" if inputs.train.remote or inputs.test.remote else ""
    reason = reason if images <= MAX_IMAGES else f"there are more than {MAX_IMAGES:,} images"
    omitted = [f"no baselines: {reason}; --baselines computes them"] if baselines is None and reason else []
    if baselines is not False and not omitted:
        try:
            found = measure_baselines(session, inputs, {"kind": kind, **settings}, classify, note)
        except UserError as error:  # e.g. a class without readable images, which fine-tuning replaces
            omitted = [f"no baselines: {error}"]
    facts = {"skipped": len(score.skipped), "data": inputs.description, **facts}
    record = session.record(
        kind, score.numbers, score.protocol, **score.context, baselines=found,
        warnings=[*warnings, *split_warnings(session, inputs, score.skipped), *omitted], **facts,
    )  # fmt: skip
    return result.from_record(record)


def measure_baselines(
    session: Session, inputs: EvalInputs, settings: dict[str, Any], classify: Classify, note: str | None
) -> dict[str, dict[str, Any]]:
    """Classify the features of the run's initial encoder and the pixels, or read the cached scores.

    `settings` are the kind of the classifier and its other JSON values, `note` states how it differs from that of the
    run. Return the fields of a `Baseline` by name.
    """
    config_file = RunDir(session.run).config
    config = read_config(config_file) if config_file.is_file() else {}
    seed, side = int(config.get("seed") or 0), min(inputs.spec.image_size, _PIXEL_SIDE)
    source = config.get("init_from")
    origin = f"random weights; the run started from {source}" if source else None
    networks = {"untrained encoder": {"encoder": inputs.spec.to_dict(), "seed": seed}, "raw pixels": {"side": side}}
    shared = {**settings, "data": _data_identity(inputs), "device": torch.device(session.device).type}
    found = {}
    for name, network in networks.items():
        identity, is_pixels = {**shared, "features": network}, name == "raw pixels"
        scores = on_rank_zero(functools.partial(_read, session, identity))
        if scores is None:
            with progress_of(name):
                if is_pixels:  # not cached: decoding is most of their cost, and they are large
                    uncached = replace(session, cache=False)
                    features = inputs.features(uncached, nn.Flatten(), image_size=side, role="pixels")
                else:
                    features = inputs.features(session, initial_encoder(inputs.spec, seed), role="untrained")
                with session.state(f"baseline-{settings['kind']}", identity) as state:
                    score = classify(*features, state)
            scores = {**score.numbers, "standard_error": score.context["standard_error"]}
            on_rank_zero(functools.partial(_write, session, identity, scores))
        found[name] = {**scores, "note": "; ".join(filter(None, (None if is_pixels else origin, note))) or None}
    return found


def initial_encoder(spec: EncoderSpec, seed: int) -> nn.Module:
    """Return the encoder with the weights that a run of this seed starts from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_encoder(spec)


def _data_identity(inputs: EvalInputs) -> list[str]:
    """Return digests of the images and the labels."""
    parts = ((inputs.train, inputs.train_labels), (inputs.test, inputs.test_labels))
    return [
        digest
        for dataset, labels in parts
        for digest in (images_digest(dataset, np.arange(len(dataset))), sha256_bytes(labels.tobytes()))
    ]


def _path(run: Path, identity: dict[str, Any]) -> Path:
    return RunDir(run).evaluation / "baselines" / f"{short_hash(identity)}.json"


def _read(session: Session, identity: dict[str, Any]) -> dict[str, Any] | None:
    """Return cached scores of this run or of another in the same folder; None if there are none."""
    run = session.run.resolve()
    own_path = _path(run, identity)
    others = run.parent.glob(f"*/{own_path.relative_to(run)}")
    for path in (own_path, *others) if session.cache else ():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(path.read_bytes())
            if record["identity"] == json.loads(json.dumps(identity)):
                return {name: record[name] for name in ("top1", "top5", "standard_error")}
    return None


def _write(session: Session, identity: dict[str, Any], numbers: dict[str, Any]) -> None:
    path = _path(session.run, identity)
    with contextlib.suppress(OSError, UserError):  # a failure of the cache is not an error
        if session.cache:
            write_atomic(path, json.dumps({**numbers, "identity": identity}, indent=1) + "\n")
