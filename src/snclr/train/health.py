"""Health metrics of a run: collapse of the features and quality of the neighbors. Labels are used for display only.

A metric that is undefined, such as one over no neighbors, is nan.
"""

import math

import torch
from torch import Tensor

from snclr.methods.base import StepOutput
from snclr.methods.common.gate import COMPARED_NEIGHBORS
from snclr.methods.common.queue import also_found

KNN_TEMPERATURE = 0.07
PURITY = "share of neighbors with the image's class"
"""The definition of neighbor purity, for progress and reports; the three below name the compared images."""
PURITY_IN_TRAINING = f"{PURITY}, augmented views against the augmented views in the queue"
PURITY_OF_CENTER_CROPS = f"{PURITY}, center crops against center crops"
PURITY_OF_QUEUE = f"{PURITY}, center crops against the augmented views in the queue"


def feature_spread(features: Tensor) -> float:
    """Return the mean standard deviation of normalized features (N, D), times √D: near 1 if uniform, 0 if collapsed."""
    return float(features.std(dim=0).mean()) * math.sqrt(features.shape[1])


def effective_rank(features: Tensor) -> float:
    """Return exp of the entropy of the normalized singular values of centered features (N, D), in 1 … min(N, D).

    They are the roots of the eigenvalues of the smaller Gram matrix, in float64 on the CPU: MPS has no float64, and the
    float64 units of most GPUs are few.
    """
    centered = features.detach().cpu().double()
    centered = centered - centered.mean(dim=0)
    gram = centered @ centered.T if len(centered) < centered.shape[1] else centered.T @ centered
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    share = values / values.sum().clamp(min=1e-300)
    return float(torch.special.entr(share).sum().exp())


def positiveness_entropy(w: Tensor, mask: Tensor) -> float:
    """Return the mean entropy of the weights (N, K) over its maximum: 1 if all are equal, 0 if one has all."""
    counts = mask.sum(dim=1)
    rows = counts > 1
    share = w[rows] / w[rows].sum(dim=1, keepdim=True).clamp(min=1e-12)
    return float((torch.special.entr(share).sum(dim=1) / counts[rows].to(w.dtype).log()).mean())


def neighbor_purity(labels: Tensor, neighbor_labels: Tensor, mask: Tensor) -> float:
    """Return the share of neighbors (N, K) with the class of their image (N,); -1 is an unknown class."""
    known = mask & (neighbor_labels >= 0) & (labels >= 0)[:, None]
    return float((neighbor_labels == labels[:, None])[known].float().mean())


def neighbor_agreement(ids: Tensor, other_ids: Tensor) -> float:
    """Return the share of neighbors (N, K), found from one view, whose image is also found from the other view.

    -1 is a missing neighbor. No labels are needed: neighbors that depend on the view are unlikely to be right.
    """
    return float(also_found(ids, other_ids)[ids >= 0].float().mean())


def queue_knn(labels: Tensor, neighbor_labels: Tensor, similarity: Tensor, mask: Tensor) -> float:
    """Return the accuracy of the weighted vote of the neighbors: kNN over the queue, at no extra cost."""
    known = mask & (neighbor_labels >= 0)
    votes = similarity.new_zeros(len(labels), max(int(labels.max()), int(neighbor_labels.max()), 0) + 1)
    weight = torch.where(known, (similarity / KNN_TEMPERATURE).exp(), 0.0)
    votes.scatter_add_(1, neighbor_labels.clamp(min=0), weight)
    rows = known.any(dim=1) & (labels >= 0)
    return float((votes.argmax(dim=1) == labels)[rows].float().mean())


def health(output: StepOutput, labels: Tensor | None, ids: Tensor) -> dict[str, float]:
    """Return the metrics above by name, without those that are undefined in this step.

    `labels` (n,) has the class of every image of the dataset, `ids` (N,) the images of this step.
    """
    values = {"spread": feature_spread(output.features), "effective_rank": effective_rank(output.features)}
    if output.neighbor_ids is not None:
        assert output.positiveness is not None
        assert output.similarity is not None
        assert output.neighbor_ages is not None
        mask = output.neighbor_ids >= 0
        values["positiveness_entropy"] = positiveness_entropy(output.positiveness, mask)
        values["neighbor_age"] = float(output.neighbor_ages[mask].float().mean())
        values["neighbor_cosine"] = float(output.similarity[mask].mean())
        if output.found_ids is not None and output.other_found_ids is not None:
            nearest = (output.found_ids[:, :COMPARED_NEIGHBORS], output.other_found_ids[:, :COMPARED_NEIGHBORS])
            values["neighbor_agreement"] = neighbor_agreement(*nearest)
        if output.pulled is not None:
            values["pulled_share"] = float(output.pulled[mask].float().mean())
        if labels is not None:
            batch_labels, neighbor_labels = labels[ids], labels[output.neighbor_ids.clamp(min=0)]
            values["neighbor_purity"] = neighbor_purity(batch_labels, neighbor_labels, mask)
            values["queue_knn"] = queue_knn(batch_labels, neighbor_labels, output.similarity, mask)
    return {name: value for name, value in values.items() if not math.isnan(value)}


def collapsed(values: dict[str, float], max_rank: int) -> bool:
    """Return whether all features are nearly equal, or lie nearly on one line.

    `max_rank` is min(images − 1, dims): the features of a tiny batch are always near a line.
    """
    return values["spread"] < 0.1 or (max_rank >= 4 and values["effective_rank"] < 2)
