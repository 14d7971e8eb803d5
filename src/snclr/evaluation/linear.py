"""Evaluate a frozen encoder with linear classifiers: the paper's augmented protocol, MAE's, or cached features."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.data.sampler import Ids
from snclr.data.splits import hold_out
from snclr.distributed.collectives import rank_and_size
from snclr.errors import UserError, count
from snclr.evaluation.baselines import FeatureClassifier, record_accuracy
from snclr.evaluation.features import BatchPlan
from snclr.evaluation.linear_task import AugmentedTask, CachedTask, LinearHeads, NormalizedHead, StandardizedFeatures
from snclr.evaluation.results import LinearResult
from snclr.evaluation.scoring import Labeled, Score, describe_sets, labeled, shared_classes, top_accuracies, true_ranks
from snclr.evaluation.session import EvalInputs, Session, open_inputs
from snclr.evaluation.state import EvalState, fit_task
from snclr.runtime.stop import StopFlag
from snclr.train.optim import scaled_lr

LEARNING_RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""The grid of `linear_cached`."""
LR_WITHOUT_GRID = 0.1
"""Learning rate if no class has two labeled images to choose one by."""
HELD_OUT = 0.1
MAE_BATCH, MAE_LR, MAE_WARMUP = 16_384, 0.1, 10.0
"""Batch, base learning rate and epochs of warm-up of MAE's protocol (He et al., 2022, Appendix A.1)."""
_BLOCK = 4096  # rows classified at once


class LrTrial(NamedTuple):
    """A learning rate and its scores on the held-out part of the training set."""

    learning_rate: float
    top1: float
    loss: float
    """Cross-entropy; decides between equal accuracies."""


@dataclass(frozen=True, kw_only=True)
class LinearScore(Score):
    """The score of a linear classifier."""

    learning_rate: float
    trials: list[LrTrial] = field(default_factory=list)
    """The learning rates tried by `linear_cached`."""


def evaluate_linear(
    session: Session, *, data: str | None, test: str | None, protocol: Literal["cached", "paper", "mae"],
    epochs: int | None, batch_size: int | None, lr: float | None, seed: int, baselines: bool | None = None,
) -> LinearResult:  # fmt: skip
    """Train and test a linear classifier on a run's encoder, compare it with baselines and record the result.

    A stop saves a checkpoint in the run directory and raises StopRequested; the same call continues.
    """
    if protocol not in ("cached", "paper", "mae"):
        raise UserError(f"protocol must be one of cached, paper, mae, not {protocol!r}")
    inputs = open_inputs(session, data, test, seed=seed)
    kind, given = f"linear-{protocol}", {"epochs": epochs, "batch_size": batch_size, "seed": seed}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    # A baseline of the paper's protocol would train as long as the run's classifier: cached features are enough.
    cached: dict[str, Any] = {"learning_rates": LEARNING_RATES, "seed": seed}
    if protocol == "cached":
        cached = {"learning_rates": LEARNING_RATES if lr is None else (lr,), **settings}
    classifier = FeatureClassifier("linear", linear_cached, session, inputs, cached)
    with session.state(kind, {**inputs.identity, **settings, "lr": lr}) as state:
        if protocol == "cached":
            score = classifier(*inputs.features(session), state)
        else:
            score = linear_probe(session, inputs, protocol=protocol, base_lr=lr, state=state, **settings)
        return record_accuracy(
            LinearResult, kind, score, classifier, baselines=baselines,
            note=None if protocol == "cached" else "cached features", learning_rate=score.learning_rate,
        )  # fmt: skip


def linear_probe(
    session: Session, inputs: EvalInputs, *, protocol: Literal["paper", "mae"] = "paper", base_lr: float | None = None,
    epochs: int = 90, batch_size: int | None = None, chunk: int = 128, seed: int = 0, state: EvalState | None = None,
) -> LinearScore:  # fmt: skip
    """Run the paper's linear evaluation: one linear layer on the frozen encoder, trained on random crops and flips.

    SGD, momentum 0.9, no weight decay, batch 4096, learning rate base_lr × batch / 256 (default: `paper_lr`), cosine to
    0. The protocol "mae" has a batch norm without parameters before the layer, LARS, a warm-up and other defaults. The
    batch is at most the size of the dataset; `chunk` images are encoded at once. The ranks share the encoding of each
    batch, and each trains the same classifier on all of it. A stop raises StopRequested; a call with the same `state`
    continues. The features of the test images are cached.
    """
    encoder, size, device, stop = inputs.encoder, inputs.spec.image_size, session.device, session.stop
    mae, why = protocol == "mae", ", given"
    if base_lr is None:
        base_lr, architecture = (MAE_LR, "all encoders") if mae else paper_lr(encoder)
        why = f", {'MAE' if mae else 'the paper'}'s for {architecture}"
    labels, test_labels = (torch.from_numpy(part) for part in (inputs.train_labels, inputs.test_labels))
    ids = np.flatnonzero(inputs.train_labels >= 0)
    classes = shared_classes(labels[ids], test_labels[test_labels >= 0])
    y = torch.searchsorted(classes, labels)  # valid for labeled images only
    batch = min(batch_size or (MAE_BATCH if mae else 4096), len(ids))
    rank, world_size = rank_and_size()
    plan = BatchPlan(
        ids, batch=batch, chunk=min(chunk, batch), epochs=epochs, seed=seed, rank=rank, world_size=world_size
    )
    lr, warmup, shape = scaled_lr(base_lr, batch), 0.0, (inputs.spec.num_features, len(classes))
    head: LinearHeads | NormalizedHead = LinearHeads(*shape, [lr], device=device)
    training = _sgd(epochs, batch)
    if mae:
        head, warmup = NormalizedHead(*shape, lr, seed=seed, device=device), min(MAE_WARMUP, epochs / 10)
        training = (
            f"batch norm without parameters before the classifier, {_sgd(epochs, batch, 'LARS')} after {warmup:g} "
            "epochs of warm-up"
        )
    task = AugmentedTask(
        head, plan, y, encoder, inputs.train, warmup_epochs=warmup, image_size=size, workers=session.workers,
        device=device, stop=stop, precision=session.precision,
    )  # fmt: skip
    fit_task(task, state, "probe", description="linear probe", stop=stop, device=device, quiet=session.quiet)
    if len(task.skipped) == len(ids):
        raise UserError(f"none of the labeled images of {inputs.train.name} could be read")
    tested = session.features(
        encoder, inputs.test, image_size=size, batch_size=chunk, labels=inputs.test_labels,
        description="linear probe, test",
    )  # fmt: skip
    queries = labeled(tested.features, tested.labels, "test")
    text = (
        f"linear probe, frozen encoder: random resized crop and flip at {size} px, {training}, learning rate {lr:g} "
        f"({base_lr:g} × batch/256{why}), seed {seed}; tested on center crops"
    )
    return _test_head(
        head, queries, classes, text, len(ids), len(labels) - len(ids), inputs.description, learning_rate=lr,
        skipped=tested.skipped, skipped_training=len(task.skipped),
    )  # fmt: skip


def paper_lr(encoder: nn.Module) -> tuple[float, str]:
    """Return the paper's base learning rate and its architecture: 3 for plain ViTs, 0.1 for any other network.

    The timm class decides, not the name: LeViT and MobileViT are partly convolutional; BEiT and EVA are plain ViTs.
    """
    from timm.models.beit import Beit
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    return (3.0, "ViTs") if isinstance(encoder, (VisionTransformer, Beit, Eva)) else (0.1, "ResNets")


def linear_cached(
    train: Tensor, train_labels: Tensor | None, test: Tensor, test_labels: Tensor | None, *, epochs: int = 100,
    batch_size: int = 1024, learning_rates: Sequence[float] = LEARNING_RATES, seed: int = 0,
    device: torch.device | str | None = None, data: str | None = None, state: EvalState | None = None,
    stop: StopFlag | None = None, quiet: bool = True,
) -> LinearScore:  # fmt: skip
    """Train one linear layer on precomputed features (n, d), without augmentation, in seconds instead of minutes.

    All learning rates are trained at once on nine tenths of each training class. The best on the last tenth is trained
    again on all of it and tested once. Features are standardized by the training set's mean and deviation. Rows with
    label -1 are ignored. `data` describes the two sets in the protocol. The classifier is trained on `device` (default:
    that of the features). `stop` raises StopRequested; a call with the same `state` continues.
    """
    keys, queries = labeled(train, train_labels, "training"), labeled(test, test_labels, "test")
    classes = shared_classes(keys.labels, queries.labels)
    features = StandardizedFeatures(
        keys.features, torch.searchsorted(classes, keys.labels), torch.device(device or train.device)
    )

    def fit(rows: Ids, rates: Sequence[float], stage: str) -> LinearHeads:
        """Train one head per learning rate on some rows."""
        heads = LinearHeads(features.x.shape[1], len(classes), rates, device=features.device)
        batch = min(batch_size, len(rows))
        plan = BatchPlan(rows, batch=batch, chunk=batch, epochs=epochs, seed=seed)
        with heads.fitting_threads(batch):
            fit_task(
                CachedTask(heads, plan, features), state, stage, description=f"linear classifier, {stage}", stop=stop,
                device=features.device, quiet=quiet, log_every=plan.steps,
            )  # fmt: skip
        return heads

    trials: list[LrTrial] = []
    lr = learning_rates[0]
    if len(learning_rates) > 1:
        rows, held_out = hold_out(features.y.cpu().numpy(), HELD_OUT, seed)
        if len(held_out) == 0:
            raise UserError(
                "no class has two training images, so none can be held out to choose a learning rate; give more images "
                "or a learning rate, such as --lr 0.1"
            )
        rates = sorted(learning_rates)
        trials = _score_heads(fit(rows, rates, "grid"), rates, features, held_out)
        lr = max(trials, key=lambda trial: (trial.top1, -trial.loss)).learning_rate
    head = fit(np.arange(len(keys.labels)), [lr], "final")
    text = (
        "linear classifier on cached features of center crops, standardized by the training set's mean and deviation: "
        f"no augmentation, {_sgd(epochs, min(batch_size, len(keys.labels)))}, "
        f"learning rate {lr:g}{_chosen(trials, lr)}, seed {seed}"
    )
    queries = queries._replace(features=features.standardize(queries.features))
    return _test_head(
        head, queries, classes, text, len(keys.labels), keys.left_out, data, learning_rate=lr, trials=trials
    )


def _score_heads(
    heads: LinearHeads, rates: Sequence[float], features: StandardizedFeatures, rows: Ids
) -> list[LrTrial]:
    """Return accuracy and loss of every head on some rows."""
    correct, loss = torch.zeros(2, len(rates), device=features.device)
    for start in range(0, len(rows), _BLOCK):
        x, y = features.rows(rows[start : start + _BLOCK])
        for head, logits in enumerate(heads.logits(x)):
            correct[head] += (true_ranks(logits, y) == 0).sum()
            loss[head] += F.cross_entropy(logits, y, reduction="sum")
    return list(map(LrTrial, rates, (correct / len(rows)).tolist(), (loss / len(rows)).tolist()))


def _test_head(
    head: LinearHeads | NormalizedHead, queries: Labeled, classes: Tensor, training: str, images: int, unlabeled: int,
    data: str | None, **fields: Any,
) -> LinearScore:  # fmt: skip
    """Test a single head; `training` describes how it was trained, on `images`, of which `unlabeled` were left out."""
    ranks, predictions, device = [], [], head.weight.device
    classes = classes.to(device)
    for start in range(0, len(queries.labels), _BLOCK):
        x, y = (part[start : start + _BLOCK].to(device) for part in queries[:2])
        (scores,) = head.logits(x)
        ranks.append(true_ranks(scores, torch.searchsorted(classes, y)).cpu())
        predictions.append(classes[scores.argmax(dim=1)].cpu())
    unlabeled += queries.left_out
    sets = describe_sets(images, len(queries.labels), len(classes), left_out=unlabeled, data=data)
    return LinearScore(
        *top_accuracies(torch.cat(ranks), len(classes)), f"{training}; {sets}", torch.cat(predictions),
        queries.labels.cpu(), unlabeled, **fields,
    )  # fmt: skip


def _sgd(epochs: int, batch: int, name: str = "SGD") -> str:
    momentum = LinearHeads.momentum
    return f"{name} (momentum {momentum}, weight decay 0), {count(epochs, 'epoch')}, batch {batch}, cosine to 0"


def _chosen(trials: list[LrTrial], lr: float) -> str:
    if not trials:
        return " (given)"
    rates = [trial.learning_rate for trial in trials]
    best = max(trial.top1 for trial in trials)
    edge = " (at the edge of the grid: a wider one may do better)" if lr in (rates[0], rates[-1]) else ""
    return (
        f", the best of {len(rates)} from {rates[0]:g} to {rates[-1]:g}{edge} on a held-out tenth of each training "
        f"class (top-1 {best:.1%} there), then trained again on all of it"
    )
