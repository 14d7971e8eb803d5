"""`snclr.demo`: pretrain and evaluate on images that come with the package, in a few minutes on a CPU."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from snclr.errors import UserError
from snclr.evaluation.results import KnnResult, LinearResult


@dataclass(frozen=True)
class DemoResult:
    """What the demo measured and wrote."""

    out: str
    seconds: float
    images: tuple[int, int]
    """Training and test images."""
    classes: list[str] | None
    knn: KnnResult
    """Accuracies of the trained encoder and, as its `baselines`, of the untrained encoder and the raw pixels."""
    linear: LinearResult
    figure: str
    report: str
    neighbor_purity: list[float]
    """Share of the 1st, 2nd, ... neighbors that have the image's class."""
    purity_description: str
    """What the neighbor purity compares, and its chance level."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"exit_code": 0, **asdict(self)}


def demo(
    *,
    out: str | Path = "demo-run",
    seed: int = 0,
    epochs: int | None = None,
    overwrite: bool = True,
    quiet: bool = False,
) -> DemoResult:
    """Run the whole workflow: pretrain, evaluate by kNN and linear probe, draw neighbors, write the report.

    The trained encoder is compared with the untrained one and with raw pixels. An earlier demo in `out` is replaced;
    any other run there is refused.

    Args:
        out: Run directory; an earlier demo in it is replaced.
        seed: Seed of all randomness.
        epochs: Number of epochs (default: the recipe's).
        overwrite: Replace an earlier demo in `out`.
        quiet: Print no progress.
    """
    import snclr
    from snclr.data.datasets.base import open_dataset

    start = time.monotonic()
    settings: dict[str, Any] = {"recipe": "demo", "data": "demo", "seed": seed, "epochs": epochs}
    replace = overwrite and _holds_demo(Path(out))
    snclr.pretrain(**settings, out=str(out), overwrite=replace, quiet=quiet)
    knn = snclr.knn(out, k=20, quiet=quiet)
    linear = snclr.linear(out, quiet=quiet)
    neighbors = snclr.neighbors(out, rows=6, k=5, seed=seed, quiet=True)
    shares = [share for share in neighbors.neighbor_purity if share is not None]
    report = snclr.report(out, rows=6, k=5, seed=seed, quiet=True)
    train, test = open_dataset("demo", split="train"), open_dataset("demo", split="test")
    return DemoResult(
        str(out), time.monotonic() - start, (len(train), len(test)), train.classes, knn, linear,
        neighbors.figure, report.report, shares, neighbors.purity_description,
    )  # fmt: skip


def _holds_demo(out: Path) -> bool:
    """Return whether `out` holds an earlier demo; raise UserError for any other run, which must not be lost.

    A directory without run settings is left to `pretrain`, which accepts only an empty one.
    """
    from snclr.checkpoint.run_dir import RunDir
    from snclr.train.config import read_config

    run = RunDir(out)
    if not (run.looks_like_run() and run.config.is_file()):
        return False
    saved = read_config(run.config)
    if saved.get("recipe") == saved.get("data") == "demo":
        return True
    raise UserError(
        f"{out} holds a run that is not a demo (recipe {saved.get('recipe')}, data {saved.get('data')}). It was not"
        " changed. Choose another --out directory."
    )
