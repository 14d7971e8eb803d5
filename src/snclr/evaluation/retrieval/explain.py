"""`snclr explain`: the loss of one image, term by term.

Symbols as in `snclr.methods.snclr`, for a batch of one image: y1, z1, y2 (1, D), neighbors NN_1..NN_K, NN_0 = y2.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from snclr.checkpoint.run_dir import RunDir
from snclr.data.datasets.base import open_dataset
from snclr.data.decode import RGBImage, load_or_none
from snclr.data.transforms.crop import center_crop
from snclr.data.transforms.views import normalize
from snclr.errors import UserError
from snclr.evaluation.results import ExplainedTerm, Explanation
from snclr.evaluation.retrieval.gallery import Gallery, training_images
from snclr.evaluation.retrieval.queries import load_query, open_queries
from snclr.evaluation.retrieval.space import snclr_space, weigh_as_trained
from snclr.evaluation.session import Session
from snclr.methods.common.kernels import Keys
from snclr.methods.common.queue import nearest_neighbors
from snclr.methods.snclr.loss import SoftNeighborLoss, neighbor_logits, weighted_loss
from snclr.runtime.device import pick_device
from snclr.runtime.stop import StopFlag
from snclr.train.load_run import load_trained_method

VIEW = "the center crop as both views, so that both directions of the loss are equal"
DrawExplanation = Callable[[Explanation, Callable[[ExplainedTerm], "RGBImage | None"], Path], None]
"""Draws an explanation to a PNG file; the function loads the image of a term, None if it cannot be read."""


class QueryFeatures(NamedTuple):
    """y1, z1 and y2 of one image, (1, D) each, and the features it is searched by; all L2-normalized."""

    y1: Tensor
    z1: Tensor
    y2: Tensor
    searched: Tensor


def explain_image(
    run: str | Path, image: str | Path, *, candidates: str, out: str | Path | None, workers: int, device: str,
    quiet: bool, draw: DrawExplanation,
) -> Explanation:  # fmt: skip
    """Explain the loss of one image among the run's queue or the images of a dataset; write the figure."""
    device = pick_device(device)
    method, config = load_trained_method(run, torch.device(device))
    if config.method != "snclr":
        raise UserError(
            f"{run} was trained with {config.method}; explain needs a run of --method snclr. For the most similar "
            "images of any run use snclr search"
        )
    trained_on, _ = training_images(run, config.data)
    query = open_queries(image, trained_on)
    pixels = load_query(image, query, min_side=2 * config.image_size)  # as feature extraction decodes
    features = project_image(method, normalize(center_crop(pixels, config.image_size)[None], device))
    if candidates == "queue":
        gallery = Gallery.from_queue(run, method.queue)
    else:
        session = Session(Path(run), device, StopFlag(), quiet, cache=False, workers=workers)
        space = snclr_space(method, config.image_size)
        gallery = Gallery.embed(session, space, open_dataset(candidates, download=True))
    query_index = gallery.index_of(query)
    loss, terms = explain_loss(method.criterion, features, gallery, own_id=-1 if query_index is None else query_index)
    label = query.class_name(0) or (None if query_index is None else gallery.label(query_index))
    terms[0] = replace(terms[0], key=query.key(0), label=label)
    settings = method.criterion.config
    figure = Path(out) if out is not None else RunDir(run).figures / f"explain-{Path(str(image)).stem}.png"
    alone = settings.sides in ("neither", "other-negatives")
    divisor = "that of y2 alone" if alone else "the sum over the rows above"
    explanation = Explanation(
        image=str(image), view=VIEW, candidates=gallery.description, loss=loss, form=settings.loss_form,
        sides=settings.sides, tau=settings.temperature, gamma=settings.gamma,
        denominator=f"divided by {divisor}; in training, the sum also has terms of the batch's other images",
        neighbors=len(terms) - 1, terms=terms, note=gallery.note,
        gate=None if method.gate is None or settings.sides == "neither" else method.gate.closed_note(),
    )  # fmt: skip

    def load(term: ExplainedTerm) -> RGBImage | None:
        return pixels if term.index is None else load_or_none(gallery.load, term.index)

    draw(explanation, load, figure)
    return replace(explanation, figure=str(figure))


@torch.no_grad()
def project_image(method: Any, image: Tensor) -> QueryFeatures:
    """Compute the features of one image (1, 3, S, S) with the method in evaluation mode."""
    assert not method.training, "batch norm must use its running statistics"
    y1, encoded = method.projector(method.encoder(image)), method.momentum_encoder(image)
    y2 = method.momentum_projector(encoded)
    searched = y2 if method.queue.search_features is None else encoded
    return QueryFeatures(*(F.normalize(t.float(), dim=1) for t in (y1, method.predictor(y1), y2, searched)))


@torch.no_grad()
def explain_loss(
    criterion: SoftNeighborLoss, query: QueryFeatures, gallery: Gallery, *, own_id: int = -1
) -> tuple[float, list[ExplainedTerm]]:
    """Compute Eq. 3, 4 and 2 for one image; return the loss and its terms, y2 first, then the neighbors by cosine.

    Images of the gallery with the id `own_id` are left out.
    """
    s = criterion.config
    y1, z1, y2, search = query
    candidates, candidate_ids = gallery.y2.to(y2), gallery.ids.to(y2.device)
    ids = torch.tensor([own_id], device=y2.device)
    searched = candidates if gallery.projections is None else gallery.features.to(search)
    nearest = nearest_neighbors(search, searched, s.neighbors, ids=ids, candidate_ids=candidate_ids)
    if not bool(nearest.mask.any()):
        raise UserError("there is no candidate other than the image itself; give more images as --candidates")
    w = weigh_as_trained(criterion, y1, candidates[nearest.index.clamp(min=0)], nearest.mask)
    pull = criterion.raises_weights
    logits = neighbor_logits(
        z1, y2, candidates, nearest.index, [Keys(y2)], nearest.index, tau=s.temperature, sides=s.sides, pull=pull
    )
    (loss,), w, _ = weighted_loss(logits, w, form=s.loss_form, sides=s.sides, pull=pull)
    mask = nearest.mask[0]
    positions = nearest.index[0][mask]
    nn_i = torch.cat([y2, candidates[positions]]).cpu().double()  # (K+1, D), on the CPU: MPS has no float64
    prediction = nn_i @ z1[0].cpu().double()
    weights = torch.cat([w.new_ones(1), w[0][mask]]).cpu().double()
    own_logits = prediction / s.temperature
    if s.sides in ("neither", "other-negatives"):  # no neighbor of this image in the denominator
        own_logits[1:] = -torch.inf
    log_p = own_logits - own_logits.logsumexp(dim=0)
    neighbors_are_positive = s.sides in ("both", "positives")
    term = weights * (-log_p if s.loss_form == "outside" and neighbors_are_positive else log_p.exp())
    if not neighbors_are_positive:
        term[1:] = 0
    share = term / term.sum() if float(term.sum()) > 0 else torch.zeros_like(term)
    indices = candidate_ids[positions].tolist()
    names = [("y2", None, None), *((gallery.key(index), index, gallery.label(index)) for index in indices)]
    compared = torch.cat([search, searched[positions]]).cpu().double()
    cosine = compared @ compared[0]
    columns = torch.stack([cosine, prediction, weights, log_p.exp(), term, share], dim=1).tolist()
    terms = [ExplainedTerm(i, *name, *row) for i, (name, row) in enumerate(zip(names, columns, strict=True))]
    return float(loss) * (2 * s.temperature if s.times_2tau else 1), terms
