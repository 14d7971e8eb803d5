"""`snclr linear`: a linear classifier on the run's frozen encoder, by the paper's protocol or on cached features."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.commands.evaluation import Session, Subject, add_common_flags, finish, open_subject, session, show
from snclr.errors import UserError

if TYPE_CHECKING:
    from snclr.evaluate.resume import Kept

PROTOCOLS = ("cached", "paper")
EXAMPLES = """examples:
  snclr linear runs/photos --data labelled-photos/              # cached features: seconds
  snclr linear runs/vit-s --data imagenet/ --protocol paper     # 90 epochs of random crops, as in the paper

cached   features of centre crops computed once; a grid of learning rates, the best chosen on a held-out part of the
         training set, never on the test set
paper    random resized crops and flips through the frozen encoder in every epoch; SGD 0.9, no weight decay, cosine,
         base learning rate × batch/256: 3 for ViTs (timm's VisionTransformer, Beit, Eva), 0.1 for any other network

The same command goes on where an interrupted one stopped. Features are kept in RUN/evaluation/features.
"""


def linear(
    run: str | Path,
    *,
    data: str | None = None,
    test: str | None = None,
    protocol: str = "cached",
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    workers: int = 0,
    device: str = "auto",
    devices: str | int = "1",
    nodes: int = 1,
    cache: bool = True,
    seed: int = 0,
    quiet: bool = False,
) -> dict[str, Any]:
    """Evaluate a run by a linear classifier; the result, with its protocol, is also added to results.jsonl.

    `lr` is the base learning rate of the paper's protocol, or the only one tried on cached features.
    A stop (Ctrl-C, SIGTERM) saves, and gives a dict with `complete` False and an `exit_code`; the same call goes on.
    """
    from snclr.evaluate.resume import Interrupted

    if protocol not in PROTOCOLS:
        raise UserError(f"protocol must be one of {', '.join(PROTOCOLS)}, not {protocol!r}")
    chosen = {"epochs": epochs, "batch_size": batch_size}
    settings = {name: value for name, value in chosen.items() if value is not None}
    kind = f"linear-{protocol}"
    with session(device=device, devices=devices, nodes=nodes, cache=cache, quiet=quiet) as at:
        try:
            s = open_subject(at, run, data, test, seed=seed)
            with at.kept(run, kind, {**s.identity, **settings, "lr": lr, "seed": seed}) as kept:
                evaluate = _cached if protocol == "cached" else _paper
                result, skipped = evaluate(at, s, lr=lr, workers=workers, seed=seed, kept=kept, **settings)
                numbers = {"top1": result.top1, "top5": result.top5}
                facts = {"learning_rate": result.learning_rate, "skipped": skipped}
                return at.record(run, kind, numbers, result.protocol, **facts)
        except Interrupted as error:
            return at.stopped(kind, error)


def _cached(
    at: Session, s: Subject, *, lr: float | None, workers: int, seed: int, kept: Kept, **settings: Any
) -> tuple[Any, int]:
    from snclr.evaluate.linear import LEARNING_RATES, linear_cached
    from snclr.evaluate.scoring import match_labels

    train_labels, test_labels, _ = match_labels(s.train, s.test)
    common: dict[str, Any] = {"image_size": s.spec.image_size, "workers": workers}
    train = at.features(s.run, s.encoder, s.train, labels=train_labels, description="training features", **common)
    tested = at.features(s.run, s.encoder, s.test, labels=test_labels, description="test features", **common)
    rates = LEARNING_RATES if lr is None else (lr,)
    result = linear_cached(
        train.features, train.labels, tested.features, tested.labels, learning_rates=rates, seed=seed, data=s.words,
        device=at.device, kept=kept, stop=at.stop, quiet=at.quiet, **settings,
    )  # fmt: skip
    return result, len(train.skipped) + len(tested.skipped)


def _paper(
    at: Session, s: Subject, *, lr: float | None, workers: int, seed: int, kept: Kept, **settings: Any
) -> tuple[Any, int]:
    from snclr.evaluate.feature_store import open_store
    from snclr.evaluate.linear import linear_probe

    size = s.spec.image_size
    store = None
    if at.cache:
        store = open_store(s.run, "encoder", s.encoder.state_dict(), s.test, image_size=size, device=at.device)
    result = linear_probe(
        s.encoder, s.train, s.test, image_size=size, base_lr=lr, seed=seed,
        workers=workers, device=at.device, data=s.words, kept=kept, stop=at.stop, store=store, quiet=at.quiet,
        **settings,
    )  # fmt: skip
    return result, len(result.skipped)


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Flags of the command."""
    parser.epilog = EXAMPLES
    add_common_flags(parser)
    parser.add_argument("--protocol", choices=PROTOCOLS, default="cached", help="how the classifier is trained")
    parser.add_argument("--epochs", type=int, metavar="N", help="passes over the data (default: 100 cached, 90 paper)")
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="images in a step (default: 1024 cached, 4096 paper)"
    )
    parser.add_argument("--lr", type=float, metavar="X", help="learning rate (default: a grid cached, 0.1 or 3 paper)")
    parser.set_defaults(handler=_run)


def _run(a: argparse.Namespace) -> int:
    record = linear(
        a.run, data=a.data, test=a.test, protocol=a.protocol, epochs=a.epochs, batch_size=a.batch_size, lr=a.lr,
        workers=a.workers, device=a.device, devices=a.devices, nodes=a.nodes, cache=not a.no_cache, seed=a.seed,
        quiet=a.json,
    )  # fmt: skip
    return finish(record, a, show)
