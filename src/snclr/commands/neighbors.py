"""`snclr neighbors`: the paper's neighbour figure for a run, or for images of one's own."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.commands.evaluation import Session, add_compute_flags, data_of, finish, session
from snclr.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from snclr.data.decode import Picture
    from snclr.data.sources import Source
    from snclr.evaluate.features import Features
    from snclr.evaluate.neighbor_space import Space
    from snclr.evaluate.neighbors import NeighborRow

MOST_QUERIES = 10_000  # of a whole set: the shares by rank are known to a per cent by then
MOST_ROWS = 24  # a taller figure helps nobody
EXAMPLES = """examples:
  snclr neighbors runs/photos                                   # of the images it was trained on
  snclr neighbors runs/photos --data other-photos/ --rows 8 --k 10 --out neighbours.png
  snclr neighbors runs/photos cat.jpg dog.jpg                   # of your own images, among those it was trained on
  snclr neighbors runs/photos cat.jpg --candidates queue        # among the features it was last compared with
  snclr neighbors runs/photos cat.jpg --candidates my-photos/   # among the images of a folder

Images are compared as in training: the k nearest by their projections (Eq. 3), ranked by their positiveness w (Eq. 4,
with the run's own f1, f2 and temperature), which is scaled so that the first has 1.000, as in the paper's figure. An
image is never its own neighbour. Edges are green or red where classes are known. Runs of other methods are compared by
their encoder's features. The table is written beside the figure, as JSON.
"""


@dataclass(frozen=True)
class _Pool:
    """Candidates: features (m, D), the number of each one's image, and the images; None where these are not at hand."""

    features: Tensor
    ids: Tensor
    source: Source | None
    words: str

    def key(self, index: int) -> str:
        return f"image {index}" if self.source is None else self.source.key(index)

    def load(self, index: int) -> Picture:
        from snclr.data.decode import BadImage

        if self.source is None:
            raise BadImage("not at hand")
        return self.source.load(index)


@dataclass(frozen=True)
class _Queries:
    """Images to find neighbours of: y2, and y1 (n, D) where it differs."""

    source: Source
    y2: Features
    y1: Tensor


def neighbors(
    run: str | Path,
    images: str | Path | Sequence[str | Path] = (),
    *,
    data: str | None = None,
    candidates: str | None = None,
    k: int = 5,
    rows: int = 6,
    seed: int = 0,
    out: str | Path | None = None,
    workers: int = 0,
    device: str = "auto",
    devices: str | int = "1",
    nodes: int = 1,
    cache: bool = True,
    quiet: bool = False,
) -> dict[str, Any]:
    """Draw images with their nearest neighbours; the figure's path, the table, and the shares of the same class.

    `images` are files, folders or keys of the data; without them, images of `data` (default: the run's own) are drawn.
    `candidates` is "queue", or images to search in (default: `data`).
    """
    from snclr.evaluate.resume import Interrupted

    if out is not None and Path(out).suffix.lower() != ".png":
        raise UserError(f"the figure {out} must end in .png")
    if k < 1 or rows < 1:
        raise UserError(f"k is {k} and rows {rows}; both must be at least 1")
    given: list[str | Path] = [images] if isinstance(images, (str, Path)) else list(images)
    with session(device=device, devices=devices, nodes=nodes, cache=cache, quiet=quiet) as at:
        try:
            return _find(at, run, given, data, candidates, k=k, rows=rows, seed=seed, out=out, workers=workers)
        except Interrupted as error:
            return at.stopped("neighbors", error)


def _find(
    at: Session, run: str | Path, images: list[str | Path], data: str | None, candidates: str | None, *, k: int,
    rows: int, seed: int, out: str | Path | None, workers: int,
) -> dict[str, Any]:  # fmt: skip
    from snclr.evaluate.neighbor_space import open_space
    from snclr.evaluate.neighbors import pick_queries, same_class_share

    space, source = at.open(
        lambda: (
            open_space(run, queue=candidates == "queue", device=at.device),
            _open_data(run, data, needed=not (images and candidates)),
        )
    )
    if images:
        pool = _pool(at, run, space, source, candidates, workers)
        opened = at.open(lambda: _open_images(images, source, pool))
        asked = [_queries(at, run, space, one, workers, keep=False) for one in opened]
    else:
        assert source is not None
        whole = _queries(at, run, space, source, workers)
        pool = _pool(at, run, space, source, candidates, workers, known=whole.y2)
        picked = pick_queries(whole.y2, max(rows, MOST_QUERIES), seed=seed)
        asked = [_Queries(source, whole.y2.take(picked), whole.y1[picked])]
    table = [row for group in asked for row in _table(space, group, pool, k)]
    drawn = table if images else table[:rows]
    shares = same_class_share(table)
    count = f"{len(table):,}" + (
        f" of the {len(whole.y2.ids):,}" if not images and len(whole.y2.ids) > len(table) else ""
    )
    protocol = (
        f"the {k} nearest by cosine of {space.words}; candidates: {pool.words}; an image is never its own neighbour; "
        f"centre crops; {count} query images" + ("" if images or source is None else f" of {source.name}, seed {seed}")
    )
    found = {
        **_write(at, run, images, asked, pool, drawn, protocol, shares, out),
        "same_class_by_rank": shares, "queries": len(table), "protocol": protocol,
        "skipped": [asdict(skip) for group in asked for skip in group.y2.skipped],
    }  # fmt: skip
    if not images and any(share is not None for share in shares):
        numbers = {f"same_class_at_{rank}": share for rank, share in enumerate(shares, start=1)}
        at.record(run, "neighbors", numbers, protocol)
    return found


def _open_data(run: str | Path, data: str | None, *, needed: bool) -> Source | None:
    """The images of `data`, or those the run was trained on; None where they are neither needed nor at hand."""
    from snclr.data.sources import open_source

    try:
        return open_source(data or data_of(run), download=True)
    except UserError:
        if needed or data is not None:
            raise
        return None


def _pool(
    at: Session, run: str | Path, space: Space, source: Source | None, candidates: str | None, workers: int,
    known: Features | None = None,
) -> _Pool:  # fmt: skip
    """The candidates; `known` are the features of the source, where they were computed before."""
    import torch.nn.functional as F

    from snclr.data.sources import open_source

    if candidates == "queue":
        return at.open(lambda: _queue_pool(run, space))
    place = source if candidates is None else at.open(lambda: open_source(candidates, download=True))
    assert place is not None
    found = known if candidates is None else None
    if found is None:
        found = at.features(
            run, space.search, place, image_size=space.image_size, role=space.role, workers=workers,
            description="candidates",
        )  # fmt: skip
    return _Pool(F.normalize(found.features, dim=1), found.ids, place, f"{len(found.ids):,} images of {place.name}")


def _queue_pool(run: str | Path, space: Space) -> _Pool:
    from snclr.evaluate.queries import training_images

    queue = space.queue
    if queue is None or len(queue) == 0:
        raise UserError(
            f"the queue of {run} is empty, so it has no neighbours in it: train for a step, or give a folder of images "
            "as --candidates"
        )
    trained_on, note = training_images(run, data_of(run))
    words = f"the run's queue, {len(queue):,} features" + ("" if note is None else f" ({note})")
    return _Pool(queue.candidates.float().cpu(), queue.ids[: len(queue)].cpu(), trained_on, words)


def _open_images(images: list[str | Path], source: Source | None, pool: _Pool) -> list[Source]:
    """Each image as a source; a key is looked up among the candidates, then in the run's images."""
    from snclr.evaluate.queries import open_queries

    places: list[Source | None] = [place for place in (pool.source, source) if place is not None] or [None]
    opened = []
    for text in images:
        errors: list[UserError] = []
        for place in places:
            try:
                opened.append(open_queries(text, place))
                break
            except UserError as error:
                errors.append(error)
        else:
            raise errors[0]
    return opened


def _queries(
    at: Session, run: str | Path, space: Space, source: Source, workers: int, *, keep: bool = True
) -> _Queries:
    """y2 and y1 of every image's centre crop; those of single images are not kept on disk."""
    here = at if keep else replace(at, cache=False, quiet=True)
    size = space.image_size
    y2 = here.features(
        run, space.search, source, image_size=size, role=space.role, workers=workers, description="queries (search)"
    )
    if space.attend is None:
        return _Queries(source, y2, y2.features)
    y1 = here.features(
        run, space.attend, source, image_size=size, role="y1", workers=workers, description="queries (attention)"
    )
    return _Queries(source, y2, y1.features)


def _table(space: Space, group: _Queries, pool: _Pool, k: int) -> list[NeighborRow]:
    """The rows of some queries, with indices of their sources, ranked by w."""
    from snclr.evaluate.neighbors import class_names, neighbor_table
    from snclr.evaluate.queries import query_labels, same_images

    source, ids = group.source, group.y2.ids
    labels = class_names(source, ids)
    query_ids = candidate_ids = None
    if pool.source is not None:
        ours, theirs = same_images(source, pool.source)
        query_ids, candidate_ids = ours[ids], theirs[pool.ids]
        known = query_labels(source, pool.source, ours, theirs)
        labels = [known[index] for index in ids.tolist()]
    table = neighbor_table(
        group.y2.features, pool.features,
        query_keys=[source.key(index) for index in ids.tolist()],
        candidate_keys=[pool.key(index) for index in pool.ids.tolist()],
        query_ids=query_ids, candidate_ids=candidate_ids, query_labels=labels,
        candidate_labels=None if pool.source is None else class_names(pool.source, pool.ids),
        attention_features=group.y1, k=k, weigh=space.weigh,
    )  # fmt: skip
    return [
        replace(
            row,
            index=int(ids[row.index]),
            neighbors=[
                replace(found, index=int(pool.ids[found.index]))
                for found in sorted(row.neighbors, key=lambda found: -found.w)
            ],
        )
        for row in table
    ]


def _write(
    at: Session, run: str | Path, images: list[str | Path], asked: list[_Queries], pool: _Pool,
    drawn: list[NeighborRow], protocol: str, shares: list[float | None], out: str | Path | None,
) -> dict[str, Any]:  # fmt: skip
    """Draw the figure and write its table beside it; their paths, and the rows."""
    from snclr.durable import write_atomic
    from snclr.evaluate.queries import file_of
    from snclr.report.neighbor_figure import draw_neighbors
    from snclr.train.run_folder import RunFolder

    name = "neighbors.png" if not images else f"neighbors-{Path(str(images[0])).stem}.png"
    path = Path(out) if out is not None else RunFolder(run).figures / name
    rows = [asdict(row) for row in drawn]
    for row in rows:
        for found in row["neighbors"]:
            file = None if pool.source is None else file_of(pool.source, found["index"])
            found["path"] = None if file is None else str(file)
    if at.first:
        places = [(group.source, index) for group in asked for index in group.y2.ids.tolist()]
        numbered = [replace(row, index=number) for number, row in enumerate(drawn[:MOST_ROWS])]
        path.parent.mkdir(parents=True, exist_ok=True)
        draw_neighbors(numbered, lambda number: places[number][0].load(places[number][1]), pool.load, path)
        content = {"protocol": protocol, "same_class_by_rank": shares, "rows": rows}
        write_atomic(path.with_suffix(".json"), json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return {"figure": str(path), "table": str(path.with_suffix(".json")), "rows": rows}


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Flags of the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("run", metavar="RUN", help="a run folder, the --out of snclr pretrain")
    parser.add_argument(
        "images", metavar="IMAGE", nargs="*", help="image files, folders, or keys of the data (default: some of --data)"
    )
    parser.add_argument("--data", help="images to draw and to search in (default: the run's own)")
    parser.add_argument("--candidates", help="where to search: queue, or images such as a folder (default: --data)")
    parser.add_argument(
        "--k", "--neighbors", dest="k", type=int, default=5, metavar="N",
        help="neighbours of each image; the paper shows 5 and 10",
    )  # fmt: skip
    parser.add_argument("--rows", type=int, default=6, metavar="N", help="images to draw, where no IMAGE is given")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which images are drawn")
    parser.add_argument("--out", metavar="PNG", help="the figure (default: RUN/figures/neighbors.png)")
    add_compute_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the drawn table as one JSON object")
    parser.set_defaults(handler=_run)


def _run(a: argparse.Namespace) -> int:
    found = neighbors(
        a.run, a.images, data=a.data, candidates=a.candidates, k=a.k, rows=a.rows, seed=a.seed, out=a.out,
        workers=a.workers, device=a.device, devices=a.devices, nodes=a.nodes, cache=not a.no_cache, quiet=a.json,
    )  # fmt: skip
    return finish(found, a, _show if a.images else _show_shares)


def _show(found: dict[str, Any], as_json: bool) -> None:
    """The neighbours of images that were asked about, one a line."""
    if not as_json:
        for row in found["rows"]:
            print(row["key"] + (f"  [{row['label']}]" if row["label"] else ""))
            for one in row["neighbors"]:
                label = f"  [{one['label']}]" if one["label"] else ""
                print(f"  w {one['w']:.3f}  cosine {one['cosine']:7.4f}  {one['path'] or one['key']}{label}")
    _show_shares(found, as_json)


def _show_shares(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    shares = [share for share in found["same_class_by_rank"] if share is not None]
    print(f"wrote {found['figure']} and {found['table']}")
    if shares:
        by_rank = ", ".join(f"{share:.1%}" for share in shares)
        print(f"neighbours of the same class, by rank, over {found['queries']:,} images: {by_rank}")
    print(f"  {found['protocol']}")
    if found["skipped"]:
        first = found["skipped"][0]
        print(f"  {len(found['skipped'])} images could not be read, e.g. {first['key']}: {first['reason']}")
