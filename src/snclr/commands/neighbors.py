"""`snclr neighbors`: the paper's neighbour figure for a run."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.commands.evaluation import data_of, pick_device

if TYPE_CHECKING:
    from snclr.evaluate.features import Features
    from snclr.evaluate.neighbors import NeighborRow

EXAMPLES = """examples:
  snclr neighbors runs/photos                                   # of the images it was trained on
  snclr neighbors runs/photos --data other-photos/ --rows 8 --k 10 --out neighbours.png

Images are compared as in training: the k nearest by their projections (Eq. 3), ranked by their positiveness w (Eq. 4),
which is scaled so that the first has 1.000, as in the paper's figure. An image is never its own neighbour. Edges are
green or red where classes are known.
"""


def neighbors(
    run: str | Path,
    *,
    data: str | None = None,
    k: int = 5,
    rows: int = 6,
    seed: int = 0,
    out: str | Path | None = None,
    workers: int = 0,
    device: str = "auto",
    quiet: bool = False,
) -> dict[str, Any]:
    """Draw images with their nearest neighbours; the figure's path, the table, and the shares of the same class."""
    from snclr.data.sources import open_source
    from snclr.evaluate.neighbors import find_neighbors, pick_queries, same_class_share
    from snclr.report.neighbor_figure import draw_neighbors
    from snclr.train.run_folder import RunFolder

    source = open_source(data or data_of(run), download=True)
    y2, y1, temperature = project(run, source, workers=workers, device=pick_device(device), quiet=quiet)
    table = [
        _by_positiveness(row)
        for row in find_neighbors(source, y2, source, y2, attention_features=y1.features, k=k, temperature=temperature)
    ]
    shown = [table[i] for i in pick_queries(y2, rows, seed=seed).tolist()]
    folder = RunFolder(run).figures
    path = Path(out) if out is not None else folder / "neighbors.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_neighbors(shown, source.load, source.load, path)
    return {
        "figure": str(path),
        "rows": [asdict(row) for row in shown],
        "same_class_by_rank": same_class_share(table),
        "queries": len(table),
    }


def _by_positiveness(row: NeighborRow) -> NeighborRow:
    """The k nearest, ranked by w as in the paper's figure: the first has 1.000."""
    return replace(row, neighbors=sorted(row.neighbors, key=lambda found: -found.w))


def project(
    run: str | Path, source: Any, *, workers: int, device: str, quiet: bool
) -> tuple[Features, Features, float]:
    """y2 and y1 of every image's centre crop (the momentum and the online projection); the attention's temperature."""
    from torch import nn

    from snclr.evaluate.features import extract_features
    from snclr.train.saved_run import load_method

    method, config, _ = load_method(run)
    common: dict[str, Any] = {"image_size": config.image_size, "workers": workers, "device": device, "quiet": quiet}
    y2 = extract_features(
        nn.Sequential(method.momentum_encoder, method.momentum_projector),
        source,
        description="projections y2",
        **common,
    )
    y1 = extract_features(
        nn.Sequential(method.encoder, method.projector), source, description="projections y1", **common
    )
    return y2, y1, config.attention_temperature


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Flags of the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("run", metavar="RUN", help="a run folder, the --out of snclr pretrain")
    parser.add_argument("--data", help="images to draw and to search in (default: the run's own)")
    parser.add_argument(
        "--k", type=int, default=5, metavar="N", help="neighbours of each image; the paper shows 5 and 10"
    )
    parser.add_argument("--rows", type=int, default=6, metavar="N", help="images to draw")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which images are drawn")
    parser.add_argument("--out", help="the PNG to write (default: RUN/figures/neighbors.png)")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes that decode images")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--json", action="store_true", help="print the drawn table as one JSON object")
    parser.set_defaults(handler=_run)


def _run(a: argparse.Namespace) -> int:
    found = neighbors(
        a.run, data=a.data, k=a.k, rows=a.rows, seed=a.seed, out=a.out, workers=a.workers, device=a.device, quiet=a.json
    )
    if a.json:
        print(json.dumps(found))
        return 0
    shares = [share for share in found["same_class_by_rank"] if share is not None]
    print(f"wrote {found['figure']}")
    if shares:
        by_rank = ", ".join(f"{share:.1%}" for share in shares)
        print(f"neighbours of the same class, by rank, over {found['queries']:,} images: {by_rank}")
    return 0
