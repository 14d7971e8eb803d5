"""`snclr explain`: what the loss of one image is made of, neighbour by neighbour."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from snclr.data.decode import Picture
    from snclr.data.sources import Source
    from snclr.evaluate.explain import Explanation, Term

EXAMPLES = """examples:
  snclr explain runs/photos cat.jpg                          # its neighbours in the run's own queue
  snclr explain runs/photos cat.jpg --candidates my-photos/  # among the images of a folder
  snclr explain demo-run demo/train/12                       # an image of the run's data, by its key

The image's centre crop is used as both views. For each of the K neighbours the run was trained with:
  cosine   with the image's momentum projection y2, by which it was chosen (Eq. 3)
  w        its positiveness (Eq. 4), with the run's own gamma, temperature and projections; 1 for y2 itself
  p        exp(z1·NN/τ) over the row's own K+1 such terms: the denominator of Eq. 2 for a batch of this one image
  share    its part of Σ w p, the sum inside the logarithm; with loss_form outside, of Σ w (−log p), the loss
"""


@dataclass(frozen=True)
class _Candidates:
    """Features (Q, D), the image each is of, and where the images are; `source` None where these are not at hand."""

    features: Tensor
    ids: Tensor
    own_id: int
    source: Source | None
    words: str


def explain(
    run: str | Path,
    image: str | Path,
    *,
    candidates: str = "queue",
    out: str | Path | None = None,
    workers: int = 0,
    device: str = "auto",
    quiet: bool = False,
) -> dict[str, Any]:
    """The neighbours of one image with cosine, positiveness, probability and share of the loss; also as a figure.

    `candidates` is "queue", the features the run was last compared with, or a folder of images.
    """
    from snclr.data.views import eval_view, normalise
    from snclr.devices import pick_device
    from snclr.evaluate.explain import VIEW, explain_loss, project_views
    from snclr.evaluate.queries import training_images
    from snclr.train.run_folder import RunFolder
    from snclr.train.saved_run import load_method

    if out is not None and Path(out).suffix.lower() != ".png":
        raise UserError(f"the figure {out} must end in .png")
    where = pick_device(device)
    method, config, _ = load_method(run, _torch_device(where))
    if config.method != "snclr":
        raise UserError(
            f"{run} was trained with {config.method}, and explain takes SNCLR's loss apart: give a run of --method"
            " snclr, or ask snclr search for the most similar images of any run"
        )
    trained_on, note = training_images(run, config.data)
    picture, query = _picture(image, trained_on, config.image_size)
    pixels = normalise(eval_view(picture, config.image_size)[None], where)
    views = project_views(method, pixels)
    if candidates == "queue":
        chosen = _queue(method, query, trained_on, note)
    else:
        chosen = _folder(method, query, candidates, config.image_size, workers=workers, device=where, quiet=quiet)
    found = explain_loss(
        method.criterion, views, chosen.features, own_id=chosen.own_id, candidate_ids=chosen.ids.to(where)
    )
    path = Path(out) if out is not None else RunFolder(run).figures / f"explain-{Path(str(image)).stem}.png"
    terms = [_named(number, term, chosen, query) for number, term in enumerate(found.terms)]
    path.parent.mkdir(parents=True, exist_ok=True)
    _draw(found, terms, chosen, picture, path)
    return {
        "image": str(image),
        "view": VIEW,
        "candidates": chosen.words,
        **{name: value for name, value in asdict(found).items() if name != "terms"},
        "neighbors": len(terms) - 1,
        "terms": terms,
        "note": note if candidates == "queue" else None,
        "figure": str(path),
    }


def _torch_device(name: str) -> Any:
    import torch

    return torch.device(name)


def _picture(image: str | Path, trained_on: Source | None, size: int) -> tuple[Picture, Source]:
    """The picture that is asked about, and a source with it alone."""
    from snclr.data.decode import BadImage
    from snclr.evaluate.queries import open_queries

    if Path(image).is_dir():
        raise UserError(f"{image} is a folder; one image is explained at a time")
    query = open_queries(image, trained_on)
    try:
        return query.load(0, min_side=2 * size), query  # as the evaluations decode
    except BadImage as error:
        raise UserError(f"{image} cannot be read: {error.reason}; give another image") from error


def _queue(method: Any, query: Source, source: Source | None, note: str | None) -> _Candidates:
    from snclr.evaluate.queries import same_images

    queue = method.queue
    own_id = -1
    if source is not None:
        ours, theirs = same_images(query, source)
        itself = (theirs == ours[0]).nonzero()
        own_id = int(itself[0, 0]) if len(itself) else -1
    words = f"the run's queue, {len(queue):,} features" + ("" if note is None else f" ({note})")
    return _Candidates(queue.candidates, queue.ids[: len(queue)].cpu(), own_id, source, words)


def _folder(method: Any, query: Source, data: str, size: int, *, workers: int, device: str, quiet: bool) -> _Candidates:
    """y2 of every image of a folder (or any other data)."""
    import torch.nn.functional as F

    from snclr.data.sources import open_source
    from snclr.evaluate.features import extract_features
    from snclr.evaluate.queries import same_images

    source = open_source(data, download=True)
    y2 = extract_features(
        method.key_network, source, image_size=size, workers=workers, device=device, description="candidates",
        quiet=quiet,
    )  # fmt: skip
    ours, theirs = same_images(query, source)
    itself = (theirs == ours[0]).nonzero()
    own_id = int(itself[0, 0]) if len(itself) else -1
    words = f"{len(y2.ids):,} images of {data}"
    return _Candidates(F.normalize(y2.features, dim=1).to(device), y2.ids, own_id, source, words)


def _named(number: int, term: Term, chosen: _Candidates, query: Source) -> dict[str, Any]:
    """A term with the name and the class of its image."""
    values = {name: value for name, value in asdict(term).items() if name != "place"}
    if number == 0:
        there = None if chosen.own_id < 0 else _label(chosen.source, chosen.own_id)
        return {"i": 0, "key": query.key(0), "index": None, "label": _label(query, 0) or there, **values}
    index = int(chosen.ids[term.place])
    key = f"image {index}" if chosen.source is None else chosen.source.key(index)
    return {"i": number, "key": key, "index": index, "label": _label(chosen.source, index), **values}


def _label(source: Source | None, index: int) -> str | None:
    import torch

    from snclr.evaluate.neighbors import class_names

    names = None if source is None else class_names(source, torch.tensor([index]))
    return None if names is None else names[0]


def _draw(found: Explanation, terms: list[dict[str, Any]], chosen: _Candidates, picture: Picture, path: Path) -> None:
    from snclr.report.explain_figure import Tile, draw_explanation

    own = terms[0]["label"]
    tiles = []
    for term in terms:
        shown = picture if term["i"] == 0 else _load(chosen.source, term["index"])
        same = None if own is None or term["label"] is None else term["label"] == own
        heading = "the image (y2)" if term["i"] == 0 else f"w = {term['w']:.3f}   p = {term['p']:.3f}"
        detail = f"p = {term['p']:.3f}   share {term['share']:.1%}"
        if term["i"]:
            detail = f"cosine {term['cosine']:.3f}   share {term['share']:.1%}"
        tiles.append(Tile(shown, heading, detail, term["share"], same))
    title = f"loss {found.loss:.3f} of one direction, {found.form} form; candidates: {chosen.words}"
    draw_explanation(tiles[0], tiles[1:], path, title=title)


def _load(source: Source | None, index: int) -> Picture | None:
    from snclr.data.decode import BadImage

    try:
        return None if source is None else source.load(index)
    except BadImage:  # gone or damaged since
        return None


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Flags of the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("run", metavar="RUN", help="a run folder, the --out of snclr pretrain")
    parser.add_argument("image", metavar="IMAGE", help="an image file, or the key of an image of the run's data")
    parser.add_argument("--candidates", default="queue", help="queue, or a folder of images to find neighbours in")
    parser.add_argument("--out", metavar="PNG", help="the figure (default: RUN/figures/explain-IMAGE.png)")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes that decode candidates")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 or mps")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(handler=_run)


def _run(a: argparse.Namespace) -> int:
    done = explain(a.run, a.image, candidates=a.candidates, out=a.out, workers=a.workers, device=a.device, quiet=a.json)
    if a.json:
        print(json.dumps(done))
        return 0
    print(f"{done['image']}: loss {done['loss']:.4f} of one direction ({done['form']} form, sides {done['sides']},")
    print(f"  τ {done['tau']:g}, γ {done['gamma']}); {done['view']}")
    print(f"  candidates: {done['candidates']}")
    print(f"\n{'i':>3} {'cosine':>8} {'w':>8} {'p':>8} {'share':>8}  image")
    for term in done["terms"]:
        label = f"  [{term['label']}]" if term["label"] else ""
        name = f"{term['key']} (y2)" if term["i"] == 0 else term["key"]
        numbers = f"{term['cosine']:8.4f} {term['w']:8.4f} {term['p']:8.4f} {term['share']:8.2%}"
        print(f"{term['i']:>3} {numbers}  {name}{label}")
    what = "Σ w p, inside the logarithm" if done["form"] == "inside" else "Σ w (−log p), the loss"
    print(f"\np: over {done['denominator']}\nshare: of {what}\nwrote {done['figure']}")
    return 0
