"""`snclr knn`: weighted nearest neighbours on the run's frozen features."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from snclr.commands.evaluation import Session, add_common_flags, finish, open_subject, session, show

EXAMPLES = """examples:
  snclr knn runs/photos --data labelled-photos/
  snclr knn runs/cifar --data cifar10 --k 20 --json
  snclr knn runs/resnet50 --data imagenet/ --workers 8 --devices 4

Features are kept in RUN/evaluation/features and used again by the next evaluation; the same command goes on where an
interrupted one stopped.
"""


def knn(
    run: str | Path,
    *,
    data: str | None = None,
    test: str | None = None,
    k: int = 200,
    temperature: float = 0.07,
    workers: int = 0,
    device: str = "auto",
    devices: str | int = "1",
    nodes: int = 1,
    cache: bool = True,
    seed: int = 0,
    quiet: bool = False,
) -> dict[str, Any]:
    """Evaluate a run by kNN; the result, with its protocol, is also added to the run's results.jsonl.

    A stop (Ctrl-C, SIGTERM) gives a dict with `complete` False and an `exit_code`; the same call goes on.
    """
    from snclr.errors import UserError
    from snclr.evaluate.resume import Interrupted

    if k < 1 or not temperature > 0:
        raise UserError(f"k is {k} and the temperature {temperature}; k must be at least 1, the temperature above 0")
    with session(device=device, devices=devices, nodes=nodes, cache=cache, quiet=quiet) as at:
        try:
            return _evaluate(at, run, data, test, k=k, temperature=temperature, workers=workers, seed=seed)
        except Interrupted as error:
            return at.stopped("knn", error)


def _evaluate(
    at: Session, run: str | Path, data: str | None, test: str | None, *, k: int, temperature: float, workers: int,
    seed: int,
) -> dict[str, Any]:  # fmt: skip
    from snclr.evaluate.knn import knn as vote
    from snclr.evaluate.scoring import match_labels

    s = open_subject(at, run, data, test, seed=seed)
    train_labels, test_labels, _ = match_labels(s.train, s.test)
    common: dict[str, Any] = {"image_size": s.spec.image_size, "workers": workers}
    train = at.features(run, s.encoder, s.train, labels=train_labels, description="training features", **common)
    tested = at.features(run, s.encoder, s.test, labels=test_labels, description="test features", **common)
    with at.kept(run, "knn", {**s.identity, "k": k, "temperature": temperature}) as kept:
        result = vote(
            train.features, train.labels, tested.features, tested.labels, k=k, temperature=temperature,
            device=at.device, data=s.words, kept=kept, stop=at.stop, quiet=at.quiet,
        )  # fmt: skip
        skipped = len(train.skipped) + len(tested.skipped)
        numbers = {"top1": result.top1, "top5": result.top5}
        return at.record(run, "knn", numbers, result.protocol, skipped=skipped)


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Flags of the command."""
    parser.epilog = EXAMPLES
    add_common_flags(parser)
    parser.add_argument("--k", type=int, default=200, metavar="N", help="neighbours that vote")
    parser.add_argument("--temperature", type=float, default=0.07, metavar="X", help="of the votes' weights")
    parser.set_defaults(handler=_run)


def _run(a: argparse.Namespace) -> int:
    record = knn(
        a.run, data=a.data, test=a.test, k=a.k, temperature=a.temperature, workers=a.workers, device=a.device,
        devices=a.devices, nodes=a.nodes, cache=not a.no_cache, seed=a.seed, quiet=a.json,
    )  # fmt: skip
    return finish(record, a, show)
