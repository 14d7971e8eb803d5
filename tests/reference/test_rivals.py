"""Each rival's loss against a naive loop straight from its paper's equation, on features in place of networks."""

import math

import pytest
import torch
from torch import nn

from snclr.heads import Prototypes
from snclr.methods.barlowtwins import BarlowTwins
from snclr.methods.byol import BYOL
from snclr.methods.mocov2 import MoCoV2
from snclr.methods.mocov3 import MoCoV3
from snclr.methods.nnclr import NNCLR
from snclr.methods.simclr import SimCLR
from snclr.methods.simsiam import SimSiam
from snclr.methods.supervised import Supervised
from snclr.methods.swav import SwAV
from snclr.soft_neighbors import NeighborQueue

N, D, TAU = 5, 4, 0.3
IDS = torch.arange(N)


def layer(seed):
    """A fixed linear map, in double precision."""
    made = nn.Linear(D, D).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return made


@pytest.fixture
def views():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(N, D, generator=generator, dtype=torch.float64) for _ in range(2)]


def cosine(a, b):
    return float(((a * b).sum() / (a.norm() * b.norm())).detach())


def loss_of(method, views, **given):
    return float(method(views, IDS, **{"epoch": 5, **given}).loss.detach())


def test_simclr_is_nt_xent(views):
    projector = layer(0)
    y = [row.detach() for view in views for row in projector(view)]  # 2N rows; i and i + N are one image
    total = 0.0
    for i in range(2 * N):
        j = (i + N) % (2 * N)
        others = sum(math.exp(cosine(y[i], y[k]) / TAU) for k in range(2 * N) if k != i)
        total -= math.log(math.exp(cosine(y[i], y[j]) / TAU) / others)
    assert loss_of(SimCLR(nn.Identity(), projector, tau=TAU), views) == pytest.approx(total / (2 * N), rel=1e-12)


@pytest.mark.parametrize("times_2tau", [True, False])
def test_mocov3_is_info_nce_in_both_directions(views, times_2tau):
    projector, predictor = layer(0), layer(1)
    y = [projector(view).detach() for view in views]
    z = [predictor(part).detach() for part in y]
    total = 0.0
    for a, b in ((0, 1), (1, 0)):
        for i in range(N):
            whole = sum(math.exp(cosine(z[a][i], y[b][k]) / TAU) for k in range(N))
            total -= math.log(math.exp(cosine(z[a][i], y[b][i]) / TAU) / whole) / N
    method = MoCoV3(nn.Identity(), projector, predictor, tau=TAU, times_2tau=times_2tau)
    assert loss_of(method, views) == pytest.approx(total * (2 * TAU if times_2tau else 1), rel=1e-12)


def test_mocov2_has_the_queue_as_negatives_but_never_its_own_image(views):
    projector, queue = layer(0), NeighborQueue(6, D, dtype=torch.float64)
    method = MoCoV2(nn.Identity(), projector, queue, tau=TAU)
    assert loss_of(method, views) == 0  # an empty queue has no negatives, and no noise
    keys, ids = torch.randn(4, D, generator=torch.Generator().manual_seed(2)).double(), [3, 70, 71, 0]
    queue.push(keys, torch.tensor(ids))
    q, k = (projector(view).detach() for view in views)
    total = 0.0
    for i in range(N):
        positive = math.exp(cosine(q[i], k[i]) / TAU)
        negatives = sum(math.exp(cosine(q[i], keys[j]) / TAU) for j in range(4) if ids[j] != i)
        total -= math.log(positive / (positive + negatives)) / N
    assert loss_of(method, views) == pytest.approx(total, rel=1e-12)
    method.finish_step(0, 10)
    assert queue.ids.tolist() == [2, 3, 4, 0, 0, 1]  # this batch's keys, oldest out first


def test_nnclr_has_the_nearest_of_another_image_as_positive(views):
    projector, predictor, queue = layer(0), layer(1), NeighborQueue(8, D, dtype=torch.float64)
    method = NNCLR(nn.Identity(), projector, predictor, queue, tau=TAU)
    y = [projector(view).detach() for view in views]
    z = [predictor(part).detach() for part in y]

    def expected(nearest):
        total = 0.0
        for a, b in ((0, 1), (1, 0)):
            for i in range(N):
                anchor = nearest(a, i)
                whole = sum(math.exp(cosine(anchor, z[b][k]) / TAU) for k in range(N))
                total -= math.log(math.exp(cosine(anchor, z[b][i]) / TAU) / whole) / N / 2
        return total

    assert loss_of(method, views) == pytest.approx(expected(lambda a, i: y[a][i]), rel=1e-12)  # nobody in the queue yet
    # The nearest of image 0 is an entry of its own, which is passed over; image 1 alone owns an entry like itself.
    keys = torch.cat([y[0][:1] * 1.01, torch.randn(3, D, generator=torch.Generator().manual_seed(3)).double()])
    ids = [0, 50, 51, 52]
    queue.push(keys, torch.tensor(ids))

    def nearest(a, i):
        allowed = [j for j in range(4) if ids[j] != i]
        return keys[max(allowed, key=lambda j: cosine(y[a][i], keys[j]))]

    output = method(views, IDS, epoch=5)
    assert float(output.loss.detach()) == pytest.approx(expected(nearest), rel=1e-12)
    assert output.neighbor_ids.shape == (N, 1)
    assert output.neighbor_ids[0, 0] != 0
    method.finish_step(0, 10)
    assert queue.ids.tolist() == [*ids[1:1], 4, 50, 51, 52, 0, 1, 2, 3]


def test_byol_is_the_squared_distance_of_unit_vectors(views):
    projector, predictor = layer(0), layer(1)
    y = [nn.functional.normalize(projector(view).detach(), dim=1) for view in views]
    z = [nn.functional.normalize(predictor(projector(view)).detach(), dim=1) for view in views]
    total = float(((z[0] - y[1]) ** 2).sum(dim=1).mean() + ((z[1] - y[0]) ** 2).sum(dim=1).mean())
    assert loss_of(BYOL(nn.Identity(), projector, predictor), views) == pytest.approx(total, rel=1e-12)


def test_simsiam_is_half_the_negative_cosine_each_way_and_stops_the_gradient(views):
    projector, predictor = layer(0), layer(1)
    y = [projector(view) for view in views]
    z = [predictor(part) for part in y]
    total = -sum(cosine(z[a][i], y[1 - a][i]) for a in (0, 1) for i in range(N)) / N / 2
    method = SimSiam(nn.Identity(), projector, predictor)
    assert loss_of(method, views) == pytest.approx(total, rel=1e-12)
    method(views, IDS, epoch=0).loss.backward()
    found = projector.weight.grad.clone()
    projector.weight.grad = None
    targets = [part.detach() for part in y]
    (-sum(nn.functional.cosine_similarity(z[a], targets[1 - a]).mean() for a in (0, 1)) / 2).backward()
    torch.testing.assert_close(found, projector.weight.grad, rtol=1e-10, atol=1e-12)


def test_barlow_twins_wants_the_identity_as_correlation(views):
    projector = layer(0)
    y = [projector(view).detach() for view in views]
    total = 0.0
    for i in range(D):
        for j in range(D):
            a, b = y[0][:, i] - y[0][:, i].mean(), y[1][:, j] - y[1][:, j].mean()
            correlation = float((a * b).sum() / (a.norm() * b.norm()))
            total += (1 - correlation) ** 2 if i == j else 0.01 * correlation**2
    method = BarlowTwins(nn.Identity(), projector, redundancy_weight=0.01)
    assert loss_of(method, views) == pytest.approx(total, rel=1e-3)  # the library's batch norm has an epsilon


def test_swav_predicts_the_other_views_codes(views):
    projector, prototypes = layer(0), Prototypes(D, 3).double()
    directions = nn.functional.normalize(prototypes.weight.detach(), dim=1)
    scores = [nn.functional.normalize(projector(view).detach(), dim=1) @ directions.T for view in views]
    total = 0.0
    for a in (0, 1):
        codes = (scores[a] / 0.05).exp()
        codes /= codes.sum()
        for _ in range(3):  # each prototype gets an equal share of the batch, then each row sums to 1
            codes = codes / codes.sum(dim=0, keepdim=True) / 3
            codes = codes / codes.sum(dim=1, keepdim=True) / N
        codes *= N
        logits = scores[1 - a] / TAU
        total -= float((codes * (logits - logits.logsumexp(dim=1, keepdim=True))).sum(dim=1).mean()) / 2
    assert loss_of(SwAV(nn.Identity(), projector, prototypes, tau=TAU), views) == pytest.approx(total, rel=1e-10)


def test_dino_matches_the_centred_sharpened_teacher(views):
    from snclr.methods.dino import build

    method = build(
        nn.Identity(), D, hidden=6, dim=3, projector_layers=3, prototypes=7, freeze_prototypes_epochs=1, momentum=0.9,
        temperature=0.1, teacher_temperature=0.07, teacher_warmup_epochs=4, center_momentum=0.8,
        momentum_schedule="constant",
    ).double()  # fmt: skip
    with torch.no_grad():  # the paper's small start would make every score alike
        for parameter in method.projector.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(4))
    student = [method.prototypes(method.projector(view)).detach() for view in views]
    teacher = [method.momentum_prototypes(method.momentum_projector(view)).detach() for view in views]
    centre = torch.zeros(7, dtype=torch.float64)
    for epoch, temperature in ((0, 0.04), (3, 0.07), (9, 0.07)):
        total = 0.0
        for a in (0, 1):
            target = ((teacher[a] - centre) / temperature).softmax(dim=1)
            total -= float((target * (student[1 - a] / 0.1).log_softmax(dim=1)).sum(dim=1).mean()) / 2
        assert loss_of(method, views, epoch=epoch) == pytest.approx(total, rel=1e-6)  # the library's τt is a float32
        centre = 0.8 * centre + 0.2 * torch.cat(teacher).mean(dim=0)
        torch.testing.assert_close(method.criterion.center.flatten(), centre)


def test_supervised_is_cross_entropy_and_leaves_unknown_labels_out(views):
    classifier = layer(0)
    labels = torch.tensor([0, 3, -1, 1, -1])
    total = 0.0
    for view in views:
        for i in (0, 1, 3):
            total -= float(classifier(view[i]).detach().log_softmax(dim=0)[labels[i]]) / 6
    method = Supervised(nn.Identity(), classifier)
    assert loss_of(method, views, labels=labels) == pytest.approx(total, rel=1e-12)
    assert loss_of(method, views, labels=torch.full((N,), -1)) == 0
