"""`snclr knn`: weighted nearest neighbours on the run's frozen features."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from snclr.commands.evaluation import add_common_flags, open_subject, show

EXAMPLES = """examples:
  snclr knn runs/photos --data labelled-photos/
  snclr knn runs/cifar --data cifar10 --k 20 --json
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
    seed: int = 0,
    quiet: bool = False,
) -> dict[str, Any]:
    """Evaluate a run by kNN; the result, with its protocol, is also added to the run's results.jsonl."""
    from snclr.evaluate.features import extract_features
    from snclr.evaluate.knn import knn as vote
    from snclr.evaluate.results import append_result
    from snclr.evaluate.scoring import match_labels

    s = open_subject(run, data, test, device=device, seed=seed)
    train_labels, test_labels, _ = match_labels(s.train, s.test)
    common: dict[str, Any] = {"image_size": s.spec.image_size, "workers": workers, "device": s.device, "quiet": quiet}
    train = extract_features(s.encoder, s.train, labels=train_labels, description="training features", **common)
    tested = extract_features(s.encoder, s.test, labels=test_labels, description="test features", **common)
    result = vote(
        train.features, train.labels, tested.features, tested.labels, k=k, temperature=temperature, data=s.words
    )
    skipped = len(train.skipped) + len(tested.skipped)
    return append_result(run, "knn", {"top1": result.top1, "top5": result.top5}, result.protocol, skipped=skipped)


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
        seed=a.seed, quiet=a.json,
    )  # fmt: skip
    show(record, a.json)
    return 0
