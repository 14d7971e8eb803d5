"""The loss of each method against a naive loop of its paper's equation, with features instead of images."""

import copy
import math

import pytest
import torch
from torch import nn

from snclr.methods.barlowtwins import BarlowTwins
from snclr.methods.byol import BYOL
from snclr.methods.common.ema import momentum_copy
from snclr.methods.config import METHODS
from snclr.methods.dino import DINO
from snclr.methods.mocov2 import MoCoV2
from snclr.methods.mocov3 import MoCoV3
from snclr.methods.nnclr import NNCLR
from snclr.methods.simclr import SimCLR
from snclr.methods.simsiam import SimSiam
from snclr.methods.supervised import Supervised
from snclr.methods.swav import SwAV

N, D, TAU = 5, 4, 0.3
IDS = torch.arange(N)
SIZES = {"hidden": 6, "dim": D, "temperature": TAU, "queue_length": 8, "prototypes": 3}


def layer(seed):
    """Return a linear layer with fixed weights in double precision."""
    linear = nn.Linear(D, D).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return linear


def build(method_class, *, projector=None, predictor=None, **settings):
    """Build a method in double precision with the identity as encoder and the given layers as heads."""
    config_class = next(c for c in METHODS.values() if c.implementation.endswith(f":{method_class.__name__}"))
    small = {name: value for name, value in SIZES.items() if name in config_class.setting_names()}
    method = method_class(nn.Identity(), D, config_class(**small | settings)).double()
    if projector is not None:
        method.projector = projector
        if hasattr(method, "momentum_projector"):
            method.momentum_projector = momentum_copy(projector)
    if predictor is not None:
        method.predictor = predictor
    return method


@pytest.fixture
def views():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(N, D, generator=generator, dtype=torch.float64) for _ in range(2)]


def cosine(a, b):
    return float(((a * b).sum() / (a.norm() * b.norm())).detach())


def loss_of(method, views, **options):
    return float(method(views, IDS, **{"epoch": 5, **options}).loss.detach())


def test_simclr_is_nt_xent(views):
    projector = layer(0)
    y = [row.detach() for view in views for row in projector(view)]  # 2N rows; i and i + N are one image
    total = 0.0
    for i in range(2 * N):
        j = (i + N) % (2 * N)
        others = sum(math.exp(cosine(y[i], y[k]) / TAU) for k in range(2 * N) if k != i)
        total -= math.log(math.exp(cosine(y[i], y[j]) / TAU) / others)
    assert loss_of(build(SimCLR, projector=projector), views) == pytest.approx(total / (2 * N), rel=1e-12)


@pytest.mark.parametrize("times_2tau", [True, False])
def test_mocov3_is_info_nce_in_both_directions(views, times_2tau):
    projector, predictor = layer(0), layer(1)
    y = [projector(view).detach() for view in views]
    z = [predictor(part).detach() for part in y]
    total = 0.0
    for a, b in ((0, 1), (1, 0)):
        for i in range(N):
            denominator = sum(math.exp(cosine(z[a][i], y[b][k]) / TAU) for k in range(N))
            total -= math.log(math.exp(cosine(z[a][i], y[b][i]) / TAU) / denominator) / N
    method = build(MoCoV3, projector=projector, predictor=predictor, times_2tau=times_2tau)
    assert loss_of(method, views) == pytest.approx(total * (2 * TAU if times_2tau else 1), rel=1e-12)


def test_mocov2_negatives_are_the_queue_entries_of_other_images(views):
    projector = layer(0)
    method = build(MoCoV2, projector=projector, queue_length=6)
    queue = method.queue
    assert loss_of(method, views) == 0  # an empty queue has no negatives
    keys, ids = torch.randn(4, D, generator=torch.Generator().manual_seed(2)).double(), [3, 70, 71, 0]
    queue.push(keys, torch.tensor(ids))
    q, k = (projector(view).detach() for view in views)
    total = 0.0
    for i in range(N):
        positive = math.exp(cosine(q[i], k[i]) / TAU)
        negatives = sum(math.exp(cosine(q[i], keys[j]) / TAU) for j in range(4) if ids[j] != i)
        total -= math.log(positive / (positive + negatives)) / N
    assert loss_of(method, views) == pytest.approx(total, rel=1e-12)
    method.after_step(0, 10)
    assert queue.ids.tolist() == [2, 3, 4, 0, 0, 1]  # this batch's keys replaced the oldest


@pytest.mark.parametrize("name", ["moco", "mocov2"])
def test_the_gradient_of_moco_is_that_of_a_naive_loop(name, views):
    config = METHODS[name](hidden=6, dim=D, queue_length=8)
    method = MoCoV2(nn.Identity(), D, config).double()
    assert len([part for part in method.projector if isinstance(part, nn.Linear)]) == (1 if name == "moco" else 2)
    reference, tau = copy.deepcopy(method), {"moco": 0.07, "mocov2": 0.2}[name]
    keys = nn.functional.normalize(torch.randn(4, D, generator=torch.Generator().manual_seed(2)).double(), dim=1)
    method.queue.push(keys, torch.tensor([3, 70, 71, 0]))
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(N):
        q = nn.functional.normalize(reference.projector(views[0][i]), dim=0)
        k = nn.functional.normalize(reference.projector(views[1][i]), dim=0).detach()
        others = [key for key, image in zip(keys, (3, 70, 71, 0), strict=True) if image != i]
        terms = [torch.exp(q @ key / tau) for key in (k, *others)]
        expected = expected - torch.log(terms[0] / torch.stack(terms).sum()) / N
    loss = method(views, IDS, epoch=0).loss
    torch.testing.assert_close(loss, expected, rtol=1e-7, atol=1e-9)
    loss.backward()
    expected.backward()
    for ours, theirs in zip(method.projector.parameters(), reference.projector.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-8)


def test_nnclr_positive_is_the_nearest_queue_entry_of_another_image(views):
    projector, predictor = layer(0), layer(1)
    method = build(NNCLR, projector=projector, predictor=predictor)
    queue = method.queue
    y = [projector(view).detach() for view in views]
    z = [predictor(part).detach() for part in y]

    def expected(nearest):
        total = 0.0
        for a, b in ((0, 1), (1, 0)):
            for i in range(N):
                anchor = nearest(a, i)
                denominator = sum(math.exp(cosine(anchor, z[b][k]) / TAU) for k in range(N))
                total -= math.log(math.exp(cosine(anchor, z[b][i]) / TAU) / denominator) / N / 2
        return total

    assert loss_of(method, views) == pytest.approx(expected(lambda a, i: y[a][i]), rel=1e-12)  # the queue is empty
    # The nearest entry of image 0 is its own, which is excluded.
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
    method.after_step(0, 10)
    assert queue.ids.tolist() == [4, 50, 51, 52, 0, 1, 2, 3]


def test_byol_is_the_squared_distance_of_unit_vectors(views):
    projector, predictor = layer(0), layer(1)
    y = [nn.functional.normalize(projector(view).detach(), dim=1) for view in views]
    z = [nn.functional.normalize(predictor(projector(view)).detach(), dim=1) for view in views]
    total = float(((z[0] - y[1]) ** 2).sum(dim=1).mean() + ((z[1] - y[0]) ** 2).sum(dim=1).mean())
    assert loss_of(build(BYOL, projector=projector, predictor=predictor), views) == pytest.approx(total, rel=1e-12)


def test_simsiam_is_the_mean_negative_cosine_with_stop_gradient(views):
    projector, predictor = layer(0), layer(1)
    y = [projector(view) for view in views]
    z = [predictor(part) for part in y]
    total = -sum(cosine(z[a][i], y[1 - a][i]) for a in (0, 1) for i in range(N)) / N / 2
    method = build(SimSiam, projector=projector, predictor=predictor)
    assert loss_of(method, views) == pytest.approx(total, rel=1e-12)
    method(views, IDS, epoch=0).loss.backward()
    gradient = projector.weight.grad.clone()
    projector.weight.grad = None
    targets = [part.detach() for part in y]
    (-sum(nn.functional.cosine_similarity(z[a], targets[1 - a]).mean() for a in (0, 1)) / 2).backward()
    torch.testing.assert_close(gradient, projector.weight.grad, rtol=1e-10, atol=1e-12)


def test_barlow_twins_penalizes_deviation_from_the_identity(views):
    projector = layer(0)
    y = [projector(view).detach() for view in views]
    total = 0.0
    for i in range(D):
        for j in range(D):
            a, b = y[0][:, i] - y[0][:, i].mean(), y[1][:, j] - y[1][:, j].mean()
            correlation = float((a * b).sum() / (a.norm() * b.norm()))
            total += (1 - correlation) ** 2 if i == j else 0.01 * correlation**2
    method = build(BarlowTwins, projector=projector, redundancy_weight=0.01)
    assert loss_of(method, views) == pytest.approx(total, rel=1e-3)  # lightly's batch norm has an epsilon


def test_swav_predicts_the_other_views_codes(views):
    projector = layer(0)
    method = build(SwAV, projector=projector)
    directions = nn.functional.normalize(method.prototypes.weight.detach(), dim=1)
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
    assert loss_of(method, views) == pytest.approx(total, rel=1e-10)


def test_dino_matches_the_centered_sharpened_teacher(views):
    method = build(
        DINO, dim=3, projector_layers=3, prototypes=7, temperature=0.1, teacher_temperature=0.07, momentum=0.9,
        teacher_warmup_epochs=4, center_momentum=0.8,
    )  # fmt: skip
    with torch.no_grad():  # with the paper's small initial weights all scores would be nearly equal
        for parameter in method.projector.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(4))
    student = [method.prototypes(method.projector(view)).detach() for view in views]
    teacher = [method.momentum_prototypes(method.momentum_projector(view)).detach() for view in views]
    center = torch.zeros(7, dtype=torch.float64)
    for epoch, temperature in ((0, 0.04), (3, 0.07), (9, 0.07)):
        total = 0.0
        for a in (0, 1):
            target = ((teacher[a] - center) / temperature).softmax(dim=1)
            total -= float((target * (student[1 - a] / 0.1).log_softmax(dim=1)).sum(dim=1).mean()) / 2
        assert loss_of(method, views, epoch=epoch) == pytest.approx(total, rel=1e-6)  # lightly's τt is a float32
        center = 0.8 * center + 0.2 * torch.cat(teacher).mean(dim=0)
        torch.testing.assert_close(method.criterion.center.flatten(), center)


def test_supervised_is_cross_entropy_over_the_labeled_images(views):
    classifier = layer(0)
    labels = torch.tensor([0, 3, -1, 1, -1])
    total = 0.0
    for view in views:
        for i in (0, 1, 3):
            total -= float(classifier(view[i]).detach().log_softmax(dim=0)[labels[i]]) / 6
    method = Supervised(nn.Identity(), D, METHODS["supervised"](), classes=D)
    method.classifier = classifier
    assert loss_of(method, views, labels=labels) == pytest.approx(total, rel=1e-12)
    assert loss_of(method, views, labels=torch.full((N,), -1)) == 0
