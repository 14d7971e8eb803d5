"""Record an accuracy with its baselines: the same classifier on features of the untrained encoder and on raw pixels.

    RUN/evaluation/baselines/KEY.json    accuracies; the key is a hash of classifier, features, images and labels

The scores are cached and shared by the runs in one folder. The directory may be deleted at any time.
"""

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import nn

from snclr.checkpoint.run_dir import RunDir
from snclr.distributed.collectives import rank_and_size
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


@dataclass(frozen=True)
class FeatureClassifier(Generic[ScoreT]):
    """`knn`, `few_shot` or `linear_cached` with its settings, for features of the inputs by any network."""

    kind: str
    classify: Callable[..., ScoreT]
    session: Session
    inputs: EvalInputs
    settings: dict[str, Any]
    """Further arguments of `classify`, JSON values."""

    def __call__(self, train: Features, test: Features, state: EvalState | None = None) -> ScoreT:
        """Classify the test features by the training features; `state` makes it resumable."""
        score = self.classify(
            train.features, train.labels, test.features, test.labels, data=self.inputs.description,
            device=self.session.device, state=state, stop=self.session.stop, quiet=self.session.quiet, **self.settings,
        )  # fmt: skip
        return replace(score, skipped=test.skipped, skipped_training=len(train.skipped))


def record_accuracy(
    result: type[ResultT], kind: str, score: Score, classifier: FeatureClassifier[Any], /, *, baselines: bool | None,
    note: str | None = None, warnings: Sequence[str] = (), **facts: Any,
) -> ResultT:  # fmt: skip
    """Append an accuracy to results.jsonl, with its baselines and all warnings; return the record as a `result`.

    `classifier` is that of the baselines; `note` states how it differs from that of the score.
    """
    session, inputs = classifier.session, classifier.inputs
    found, omitted = {}, []
    if baselines is None and len(inputs.train) + len(inputs.test) > MAX_IMAGES:
        omitted = [f"no baselines: there are more than {MAX_IMAGES:,} images; --baselines computes them"]
    elif baselines is None and (inputs.train.remote or inputs.test.remote):
        omitted = ["no baselines: the images are remote; --baselines computes them"]
    elif baselines is not False:
        try:
            found = measure_baselines(classifier, note)
        except UserError as error:  # e.g. a class without readable images, which fine-tuning replaces
            omitted = [f"no baselines: {error}"]
    facts = {"skipped": score.skipped_training + len(score.skipped), "data": inputs.description, **facts}
    record = session.record(
        kind, score.numbers, score.protocol, **score.context, baselines=found,
        warnings=[*warnings, *split_warnings(session, inputs, score.skipped), *omitted], **facts,
    )  # fmt: skip
    return result.from_record(record)


def measure_baselines(classifier: FeatureClassifier[Any], note: str | None) -> dict[str, dict[str, Any]]:
    """Classify the features of the run's initial encoder and the pixels; return the fields of a `Baseline` by name."""
    session, inputs = classifier.session, classifier.inputs
    config_file = RunDir(session.run).config
    config = read_config(config_file) if config_file.is_file() else {}
    seed, source = int(config.get("seed") or 0), config.get("init_from")
    zero_init = bool(config.get("zero_init_residual", False))
    side = min(inputs.spec.image_size, _PIXEL_SIDE)
    uncached = replace(session, cache=False)  # decoding is most of the cost of pixels, and they are large
    origin = f"random weights; the run started from {source}" if source else None
    untrained = _measure(
        classifier, "untrained encoder",
        {"encoder": inputs.spec.to_dict(), "seed": seed, "zero_init_residual": zero_init},
        lambda: inputs.features(session, initial_encoder(inputs.spec, seed, zero_init), role="untrained"),
    )  # fmt: skip
    pixels = _measure(
        classifier, "raw pixels", {"side": side},
        lambda: inputs.features(uncached, nn.Flatten(), image_size=side, role="pixels"),
    )  # fmt: skip
    return {
        "untrained encoder": {**untrained, "note": "; ".join(filter(None, (origin, note))) or None},
        "raw pixels": {**pixels, "note": note},
    }


def _measure(
    classifier: FeatureClassifier[Any], name: str, network: dict[str, Any],
    extract: Callable[[], tuple[Features, Features]],
) -> dict[str, Any]:  # fmt: skip
    """Return the accuracies with the features that `extract` computes, or read them from the cache.

    `network` identifies these features: JSON values, part of the key in the cache.
    """
    session, inputs = classifier.session, classifier.inputs
    precision = {} if session.precision == "32" else {"precision": session.precision}
    identity = {
        "kind": classifier.kind, **classifier.settings, "data": _data_identity(inputs),
        "device": torch.device(session.device).type, "features": network, **precision,
    }  # fmt: skip
    own_path = RunDir(session.run.resolve()).evaluation / "baselines" / f"{short_hash(identity)}.json"
    scores = on_rank_zero(lambda: _read(own_path, session.run.resolve())) if session.cache else None
    if scores is None:
        with progress_of(name), session.state(f"baseline-{classifier.kind}", identity) as state:
            score = classifier(*extract(), state)
        scores = {**score.numbers, "standard_error": score.context["standard_error"]}
        content = json.dumps({**scores, "identity": identity}, indent=1) + "\n"
        with contextlib.suppress(OSError, UserError):  # a failure of the cache is not an error
            if session.cache and rank_and_size()[0] == 0:
                write_atomic(own_path, content)
    return scores


def initial_encoder(spec: EncoderSpec, seed: int, zero_init_residual: bool) -> nn.Module:
    """Return the encoder with the weights that a run of this seed starts from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_encoder(spec, zero_init_residual=zero_init_residual)


def _data_identity(inputs: EvalInputs) -> list[str]:
    """Return digests of the images and the labels."""
    digests = []
    for dataset, labels in ((inputs.train, inputs.train_labels), (inputs.test, inputs.test_labels)):
        digests += [images_digest(dataset, np.arange(len(dataset))), sha256_bytes(labels.tobytes())]
    return digests


def _read(own_path: Path, run: Path) -> dict[str, Any] | None:
    """Return cached scores of this run or of another in the same folder; None if there are none."""
    for path in (own_path, *run.parent.glob(f"*/{own_path.relative_to(run)}")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(path.read_bytes())
            return {name: record[name] for name in ("top1", "top5", "standard_error")}
    return None
