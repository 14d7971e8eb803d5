"""Run every evaluation of a run, in this process or on several ranks: python evaluation_worker.py RUN OUT."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import snclr
from snclr.distributed.collectives import rank_and_size
from snclr.evaluation import finetune as engine
from snclr.evaluation import linear


def measure(run: Path, out: Path) -> None:
    """Write all results to OUT/results.json, and features, linear heads and fine-tuned weights to .npz files."""
    out.mkdir(parents=True, exist_ok=True)
    original, score = engine.evaluate_classifier, linear._test_head
    heads: dict[str, Any] = {}

    def evaluate_and_save(model: Any, *arguments: Any, **options: Any) -> Any:
        if rank_and_size()[0] == 0:
            np.savez(out / "weights.npz", **{name: value.numpy() for name, value in model.state_dict().items()})
        return original(model, *arguments, **options)

    def score_and_keep(head: Any, *arguments: Any, **fields: Any) -> Any:
        heads.update({f"{len(heads)} {name}": value.numpy() for name, value in head.state().items()})
        return score(head, *arguments, **fields)

    engine.evaluate_classifier, linear._test_head = evaluate_and_save, score_and_keep
    try:
        found = {
            "knn": snclr.knn(run, k=7, quiet=True).to_dict(),
            "linear": snclr.linear(run, epochs=10, batch_size=32, quiet=True).to_dict(),
            "probe": snclr.linear(run, protocol="paper", epochs=3, batch_size=96, lr=10.0, quiet=True).to_dict(),
            "mae": snclr.linear(run, protocol="mae", epochs=3, batch_size=48, lr=1.0, quiet=True).to_dict(),
            "finetune": snclr.finetune(run, labels="50%", epochs=3, batch_size=8, lr=0.5, quiet=True).to_dict(),
            "embed": snclr.embed(run, out=out / "features.npz", batch_size=16, quiet=True).to_dict(),
            "neighbors": snclr.neighbors(run, rows=4, out=out / "neighbors.png", quiet=True).to_dict(),
        }
    finally:
        engine.evaluate_classifier, linear._test_head = original, score
    if rank_and_size()[0] == 0:
        np.savez(out / "heads.npz", **heads)
        (out / "results.json").write_text(json.dumps(found))


if __name__ == "__main__":
    measure(Path(sys.argv[1]), Path(sys.argv[2]))
