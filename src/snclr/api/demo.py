"""`snclr.demo`: pretrain and evaluate on images that come with the package, in a few minutes on a CPU."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.errors import UserError

if TYPE_CHECKING:
    from snclr.evaluation.features import Features


@dataclass(frozen=True)
class DemoScore:
    """Top-1 accuracies of one set of features on the test images, with their protocols."""

    knn: float
    linear: float
    knn_protocol: str
    linear_protocol: str


@dataclass(frozen=True)
class DemoResult:
    """What the demo measured and wrote."""

    out: str
    seconds: float
    images: tuple[int, int]
    """Training and test images."""
    classes: list[str] | None
    table: dict[str, DemoScore]
    """Scores of the trained encoder, the untrained encoder and the raw pixels."""
    figure: str
    report: str
    neighbor_purity: list[float]
    """Share of the 1st, 2nd, ... neighbors that have the image's class."""

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
    from snclr.checkpoint.encoder_file import load_encoder
    from snclr.data.datasets.base import open_dataset
    from snclr.evaluation.features import extract_features, pixel_features
    from snclr.train.build import build_method, encoder_spec
    from snclr.train.config import resolve

    start = time.monotonic()
    settings: dict[str, Any] = {"recipe": "demo", "data": "demo", "seed": seed, "epochs": epochs}
    replace = overwrite and _holds_demo(Path(out))
    snclr.pretrain(**settings, out=str(out), overwrite=replace, quiet=quiet)
    trained, spec = load_encoder(Path(out))
    config = resolve(settings)
    untrained = build_method(config, encoder_spec(config)).encoder  # the weights that the training started from
    sets = train, test = open_dataset("demo", split="train"), open_dataset("demo", split="test")

    def features(encoder: Any) -> list[Features]:
        size = spec.image_size
        return [extract_features(encoder.eval(), images, image_size=size, quiet=True) for images in sets]

    table = {
        "trained (SNCLR)": _score(features(trained), out),
        "untrained": _score(features(untrained)),
        "raw pixels": _score([pixel_features(images, spec.image_size) for images in sets]),
    }
    neighbors = snclr.neighbors(out, rows=6, k=5, seed=seed, quiet=True)
    shares = [share for share in neighbors.neighbor_purity if share is not None]
    report = snclr.report(out, rows=6, k=5, seed=seed, quiet=True)
    return DemoResult(
        str(out), time.monotonic() - start, (len(train), len(test)), train.classes, table,
        neighbors.figure, report.report, shares,
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


def _score(features: list[Features], out: str | Path | None = None) -> DemoScore:
    """Measure the kNN and linear accuracy of training and test features; add them to the results of a run."""
    from snclr.evaluation.knn import knn
    from snclr.evaluation.linear import linear_cached
    from snclr.evaluation.results import append_result

    train, test = features
    labeled = (train.features, train.labels, test.features, test.labels)
    by_knn, by_linear = knn(*labeled, k=20, data="demo"), linear_cached(*labeled, data="demo")
    if out is not None:
        append_result(out, "knn", {"top1": by_knn.top1, "top5": by_knn.top5}, by_knn.protocol)
        append_result(out, "linear-cached", {"top1": by_linear.top1, "top5": by_linear.top5}, by_linear.protocol)
    return DemoScore(by_knn.top1, by_linear.top1, by_knn.protocol, by_linear.protocol)
