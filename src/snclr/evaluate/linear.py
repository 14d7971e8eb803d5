"""Linear classifiers on a frozen encoder: the paper's augmented protocol, and a quick one on cached features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.data.loader import Skip
from snclr.data.sources import Source
from snclr.data.splits import hold_out
from snclr.distributed import rank_and_size
from snclr.errors import UserError
from snclr.evaluate.feature_store import FeatureStore
from snclr.evaluate.features import encode_batches, extract_features, frozen
from snclr.evaluate.images import Plan
from snclr.evaluate.linear_heads import LinearHeads
from snclr.evaluate.linear_training import Fit, Probe, feature_width, hidden
from snclr.evaluate.resume import Kept
from snclr.evaluate.scoring import (
    Labelled,
    check_classes,
    describe_sets,
    labelled,
    match_labels,
    top_shares,
    true_ranks,
)
from snclr.progress import Progress
from snclr.train.optim import scaled_lr
from snclr.train.signals import StopRequest

BASE_LR = {"resnet": 0.1, "vit": 3.0}
"""The paper's base learning rates of `linear_probe`."""
LEARNING_RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""The grid of `linear_cached`."""
HELD_OUT = 0.1
_BLOCK = 4096  # rows classified at once


class Trial(NamedTuple):
    """A learning rate that was tried, and how it did on the held-out part of the training set."""

    learning_rate: float
    top1: float
    loss: float
    """Cross-entropy: decides between equal accuracies."""


@dataclass(frozen=True)
class LinearResult:
    """Accuracies in [0, 1]; `top5` is None with five classes or fewer."""

    top1: float
    top5: float | None
    learning_rate: float
    protocol: str
    predictions: Tensor
    """(n,) the class each labelled test image was given, on the CPU."""
    trials: list[Trial] = field(default_factory=list)
    """How the learning rate was chosen (`linear_cached`)."""
    skipped: list[Skip] = field(default_factory=list)
    """Images that could not be read (`linear_probe`), training images first."""


def linear_probe(
    encoder: nn.Module,
    train: Source,
    test: Source,
    *,
    image_size: int,
    base_lr: float | None = None,
    epochs: int = 90,
    batch_size: int = 4096,
    chunk: int = 128,
    seed: int = 0,
    workers: int = 0,
    device: torch.device | str = "cpu",
    data: str | None = None,
    kept: Kept | None = None,
    stop: StopRequest | None = None,
    store: FeatureStore | None = None,
    quiet: bool = False,
) -> LinearResult:
    """The paper's linear evaluation: one linear layer on the frozen encoder, trained on random crops and flips.

    SGD, momentum 0.9, no weight decay, learning rate base_lr × batch / 256 (default: `paper_lr`), cosine to 0. The
    batch is lowered to the size of the data; `chunk` images go through the encoder at once. The encoder stays as it
    was. Several processes share each batch, and each trains the same classifier on all of it. `stop` ends the work with
    Interrupted; a call with the same `kept` goes on. `store` keeps the features of the test images.
    """
    why = ", given" if base_lr is not None else f", the paper's for {'ViTs' if is_plain_vit(encoder) else 'ResNets'}"
    base_lr = paper_lr(encoder) if base_lr is None else base_lr
    _check(epochs, batch_size, [base_lr])
    train_labels, test_labels, _ = match_labels(train, test)
    ids = np.flatnonzero(train_labels >= 0)
    classes = _classes(torch.from_numpy(train_labels[ids]), torch.from_numpy(test_labels[test_labels >= 0]))
    y = torch.searchsorted(classes, torch.from_numpy(train_labels))  # meant for the labelled ones alone
    batch = min(batch_size, len(ids))
    lr = scaled_lr(base_lr, batch)
    plan = Plan(ids, batch=batch, chunk=min(chunk, batch), epochs=epochs, seed=seed, part=rank_and_size())
    head = LinearHeads(feature_width(encoder, image_size, device), len(classes), [lr], device=device)
    with frozen(encoder), Progress("linear probe", total=epochs * len(ids), quiet=hidden(quiet)) as progress:
        training = Probe(head, y, plan, kept, progress)
        encoded = encode_batches(
            encoder, train, plan, image_size=image_size, workers=workers, device=device, progress=progress,
            start=training.step, stop=stop,
        )  # fmt: skip
        training.run(encoded)
    if not training.seen:
        raise UserError(f"none of the labelled images of {train.name} could be read; there is nothing to train on")
    tested = extract_features(
        encoder, test, image_size=image_size, batch_size=chunk, workers=workers, device=device, labels=test_labels,
        description="linear probe, test", store=store, stop=stop, quiet=quiet,
    )  # fmt: skip
    queries = labelled(tested.features, tested.labels, "test")
    ranks, predictions = _classify(head, queries, classes)
    left_out = len(train) - len(ids) + queries.left_out
    protocol = (
        f"linear probe, frozen encoder: random resized crop and flip at {image_size} px, {_sgd(epochs, batch)}, "
        f"learning rate {lr:g} ({base_lr:g} × batch/256{why}), seed {seed}; tested on centre crops; "
        + describe_sets(len(ids), len(queries.labels), len(classes), left_out=left_out, data=data)
    )
    unreadable = [training.skipped[index] for index in sorted(training.skipped)] + tested.skipped
    return LinearResult(*top_shares(ranks, len(classes)), lr, protocol, predictions, skipped=unreadable)


def paper_lr(encoder: nn.Module) -> float:
    """The paper's base learning rate of `linear_probe`: that of ViTs, or for any other network that of ResNets."""
    return BASE_LR["vit" if is_plain_vit(encoder) else "resnet"]


def is_plain_vit(encoder: nn.Module) -> bool:
    """Whether an encoder is a ViT as the paper's: patches, then equal blocks of attention; timm has three such classes.

    By its class, not its name: LeViT and MobileViT are convolutional in part, and BEiT and EVA are ViTs.
    """
    from timm.models.beit import Beit
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    return isinstance(encoder, (VisionTransformer, Beit, Eva))


def linear_cached(
    train: Tensor,
    train_labels: Tensor | None,
    test: Tensor,
    test_labels: Tensor | None,
    *,
    epochs: int = 100,
    batch_size: int = 1024,
    learning_rates: Sequence[float] = LEARNING_RATES,
    seed: int = 0,
    device: torch.device | str | None = None,
    data: str | None = None,
    kept: Kept | None = None,
    stop: StopRequest | None = None,
    quiet: bool = True,
) -> LinearResult:
    """One linear layer on features (n, d) computed once, without augmentation: minutes become seconds.

    All learning rates are trained at once on nine tenths of each training class; the best on the last tenth is trained
    again on all of it and tested once. Features are standardised by the training set's mean and deviation. Rows with
    label -1 are left out. `data` says what the two sets are, for the protocol. The classifier is trained on `device`
    (default: where the features are); `stop` ends that with Interrupted, and a call with the same `kept` goes on.
    """
    _check(epochs, batch_size, learning_rates)
    known, queries = labelled(train, train_labels, "training"), labelled(test, test_labels, "test")
    if train.shape[1:] != test.shape[1:]:
        raise UserError(
            f"training features {tuple(train.shape)} and test features {tuple(test.shape)} differ in width; "
            "take both from the same encoder"
        )
    classes = _classes(known.labels, queries.labels)
    fit = Fit(
        known.features, torch.searchsorted(classes, known.labels), len(classes), epochs, batch_size, seed, quiet,
        torch.device(device or train.device), kept, stop,
    )  # fmt: skip
    trials = [] if len(learning_rates) == 1 else _try(fit, sorted(learning_rates))
    lr = max(trials, key=lambda trial: (trial.top1, -trial.loss)).learning_rate if trials else learning_rates[0]
    head = fit.train(np.arange(len(known.labels)), [lr], "final")
    ranks, predictions = _classify(head, queries._replace(features=fit.standardise(queries.features)), classes)
    sets = describe_sets(
        len(known.labels), len(queries.labels), len(classes), left_out=known.left_out + queries.left_out, data=data
    )
    protocol = (
        "linear classifier on cached features of centre crops, standardised by the training set's mean and deviation: "
        f"no augmentation, {_sgd(epochs, min(batch_size, len(known.labels)))}, "
        f"learning rate {lr:g}{_chosen(trials, lr)}, seed {seed}; {sets}"
    )
    return LinearResult(*top_shares(ranks, len(classes)), lr, protocol, predictions, trials=trials)


def _try(fit: Fit, learning_rates: Sequence[float]) -> list[Trial]:
    """Train all learning rates on most of each class and score them on the rest."""
    kept, held = hold_out(fit.y.cpu().numpy(), HELD_OUT, fit.seed)
    if len(held) == 0:
        raise UserError(
            "no class has two training images, so none can be held out to choose a learning rate; give more images, or "
            "one learning rate, e.g. learning_rates=[0.1]"
        )
    heads = fit.train(kept, learning_rates, "grid")
    correct, loss = torch.zeros(2, len(learning_rates), device=fit.device)
    for start in range(0, len(held), _BLOCK):
        x, y = fit.rows(held[start : start + _BLOCK])
        for head, scores in enumerate(heads.logits(x)):
            correct[head] += (true_ranks(scores, y) == 0).sum()
            loss[head] += F.cross_entropy(scores, y, reduction="sum")
    columns = (learning_rates, (correct / len(held)).tolist(), (loss / len(held)).tolist())
    return [Trial(*values) for values in zip(*columns, strict=True)]


def _classify(head: LinearHeads, queries: Labelled, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Rank of the true class (n,) and predicted class (n,) by a single head, on the CPU."""
    ranks, predictions = [], []
    device = head.weight.device
    classes = classes.to(device)
    for start in range(0, len(queries.labels), _BLOCK):
        x, y = (part[start : start + _BLOCK].to(device) for part in queries[:2])
        (scores,) = head.logits(x)
        ranks.append(true_ranks(scores, torch.searchsorted(classes, y)).cpu())
        predictions.append(classes[scores.argmax(dim=1)].cpu())
    return torch.cat(ranks), torch.cat(predictions)


def _classes(train_labels: Tensor, test_labels: Tensor) -> Tensor:
    """The classes (C,), sorted; UserError unless the training set has every class of the test set."""
    classes, known = check_classes(train_labels, test_labels)
    if not bool(known.all()):
        lost = torch.unique(test_labels[~known])
        raise UserError(
            f"{len(lost)} of the test images' classes have no training image (class {lost[0].item()} is one), so no "
            "classifier can learn them; add training images of these classes, or take the classes out of the test set"
        )
    return classes


def _sgd(epochs: int, batch: int) -> str:
    return f"SGD (momentum {LinearHeads.momentum}, weight decay 0), {epochs} epochs, batch {batch}, cosine to 0"


def _chosen(trials: list[Trial], lr: float) -> str:
    if not trials:
        return " (given)"
    rates = [trial.learning_rate for trial in trials]
    best = max(trial.top1 for trial in trials)
    edge = " (at the edge of the grid: a wider one may do better)" if lr in (rates[0], rates[-1]) else ""
    return (
        f", the best of {len(rates)} from {rates[0]:g} to {rates[-1]:g}{edge} on a held-out tenth of each training "
        f"class (top-1 {best:.1%} there), then trained again on all of it"
    )


def _check(epochs: int, batch_size: int, learning_rates: Sequence[float]) -> None:
    if epochs < 1 or batch_size < 1:
        raise UserError(f"epochs is {epochs} and batch_size {batch_size}; both must be at least 1")
    if not learning_rates or not all(0 < lr < math.inf for lr in learning_rates):
        raise UserError(
            f"the learning rates are {list(learning_rates)}; needed is at least one, all above 0 and finite"
        )
