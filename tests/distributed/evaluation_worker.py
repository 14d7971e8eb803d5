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


def measure(run: Path, out: Path) -> None:
    """Write all results to OUT/results.json, features to OUT/features.npz and fine-tuned weights to OUT/weights.npz."""
    out.mkdir(parents=True, exist_ok=True)
    original = engine.evaluate_classifier

    def evaluate_and_save(model: Any, *arguments: Any, **options: Any) -> Any:
        if rank_and_size()[0] == 0:
            np.savez(out / "weights.npz", **{name: value.numpy() for name, value in model.state_dict().items()})
        return original(model, *arguments, **options)

    engine.evaluate_classifier = evaluate_and_save
    try:
        found = {
            "knn": snclr.knn(run, k=7, quiet=True).to_dict(),
            "linear": snclr.linear(run, epochs=10, batch_size=32, quiet=True).to_dict(),
            "probe": snclr.linear(run, protocol="paper", epochs=3, batch_size=96, lr=10.0, quiet=True).to_dict(),
            "finetune": snclr.finetune(run, labels="50%", epochs=3, batch_size=8, lr=0.5, quiet=True).to_dict(),
            "embed": snclr.embed(run, out=out / "features.npz", batch_size=16, quiet=True).to_dict(),
            "neighbors": snclr.neighbors(run, rows=4, out=out / "neighbors.png", quiet=True).to_dict(),
        }
    finally:
        engine.evaluate_classifier = original
    if rank_and_size()[0] == 0:
        (out / "results.json").write_text(json.dumps(found))


if __name__ == "__main__":
    measure(Path(sys.argv[1]), Path(sys.argv[2]))
