"""PIRL and DetCo: random numbers on the device, the grid, the memory bank, and both losses against naive loops."""

import copy
import math

import numpy as np
import pytest
import torch

from snclr.errors import UserError
from snclr.methods.common.hashing import hash_below, hash_bits
from snclr.methods.jigsaw.detco import STAGE_WEIGHTS, DetCo, stage_features, stage_widths
from snclr.methods.jigsaw.patches import PATCHES, cut_grid, patch_size
from snclr.methods.jigsaw.pirl import PIRL, MemoryBank
from snclr.models.encoders import build_encoder, resolve_encoder
from snclr.runtime import random_bits
from snclr.train.build import build_method, encoder_spec
from snclr.train.config import resolve

TAU = 0.3


def small(name, **settings):
    sizes = {"recipe": "demo", "method": name, "image_size": 16, "hidden": 12, "dim": 6, "temperature": TAU}
    config = resolve({**sizes, **settings})
    return build_method(config, encoder_spec(config), images=40).double()


def batch(step, count=6):
    generator = torch.Generator().manual_seed(step)
    views = [torch.randn(count, 3, 16, 16, generator=generator, dtype=torch.float64) for _ in range(2)]
    return views, (torch.arange(count) * 5 + step) % 11


def unit(rows):
    return [row / row.norm() for row in rows]


def assert_same_gradients(method, reference):
    expected = dict(reference.named_parameters())
    compared = 0
    for name, parameter in method.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-7, atol=1e-9, msg=name)
            parameter.grad = expected[name].grad = None
            compared += 1
    assert compared > 5


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_the_device_draws_the_same_numbers_as_the_host(seed):
    ids = np.array([0, 1, 7, 2**40, 12_345])
    for epoch, view in ((0, 0), (799, -16), (10**6, -19)):
        expected = random_bits.hash_bits(seed, epoch, ids, view, np.arange(1, 21))
        assert np.array_equal(hash_bits(seed, epoch, torch.from_numpy(ids), view, 20).numpy(), expected)
    drawn = hash_below(7, seed, 3, torch.from_numpy(ids), -16, 400)
    assert set(drawn.unique().tolist()) == set(range(7))


@pytest.mark.parametrize("size", [16, 32, 45, 224])
def test_patches_are_the_nine_cells_of_the_view_in_random_order(size):
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    ids = torch.tensor([4, 9, 30])
    views = torch.stack([torch.stack([rows, columns, torch.full_like(rows, i)]) for i in ids.tolist()]).float()
    patches = cut_grid(views, ids, seed=3, epoch=2, view=1)
    side, cell = patch_size(size), size // 3
    assert patches.shape == (3 * PATCHES, 3, side, side)
    orders = []
    for image in range(3):
        cells = []
        for patch in patches[image * PATCHES : (image + 1) * PATCHES]:
            top, left = int(patch[0, 0, 0]), int(patch[1, 0, 0])
            assert torch.equal(patch, views[image, :, top : top + side, left : left + side])
            assert top // cell == (top + side - 1) // cell  # inside one cell
            assert left // cell == (left + side - 1) // cell
            cells.append(top // cell * 3 + left // cell)
        assert sorted(cells) == list(range(9))
        orders.append(cells)
    assert orders[0] != orders[1] != orders[2]
    alone = cut_grid(views[1:2], ids[1:2], seed=3, epoch=2, view=1)
    assert torch.equal(alone, patches[PATCHES : 2 * PATCHES])  # does not depend on the rest of the batch
    for change in ({"seed": 4}, {"epoch": 3}, {"view": 0}):
        assert not torch.equal(cut_grid(views, ids, **{"seed": 3, "epoch": 2, "view": 1, **change}), patches)


def test_the_bank_averages_the_features_of_each_image():
    bank, generator = MemoryBank(5, 3, seed=0).double(), torch.Generator().manual_seed(0)
    kept = {}
    for ids in ([0, 3], [3, 1, 3], [0, 1]):
        features = torch.randn(len(ids), 3, generator=generator, dtype=torch.float64)
        bank.update(features, torch.tensor(ids), momentum=0.7)
        newest = dict(zip(ids, unit(features), strict=True))  # the last of an image that is there twice
        for i, row in newest.items():
            kept[i] = unit([0.7 * kept[i] + 0.3 * row])[0] if i in kept else row
        for i in range(5):
            assert bool(bank.seen[i]) == (i in kept)
            torch.testing.assert_close(bank.features[i], kept.get(i, torch.zeros(3, dtype=torch.float64)))
    with pytest.raises(UserError, match="at least two images"):
        MemoryBank(1, 3, seed=0)


def test_negatives_are_drawn_by_seed_and_step_and_never_the_image_itself():
    def filled(seed):
        bank = MemoryBank(50, 8, seed=seed)
        bank.update(torch.randn(40, 8, generator=torch.Generator().manual_seed(1)), torch.arange(40), momentum=0.5)
        return bank

    bank, ids = filled(0), torch.tensor([0, 7, 39])
    steps = []
    for _ in range(20):
        negatives, excluded = bank.negatives(ids, 30)
        assert negatives.shape == (30, 8)
        for row, image in enumerate(ids.tolist()):
            allowed = negatives[~excluded[row]]
            assert (allowed.norm(dim=1) > 0.5).all()  # no empty entry
            assert not (allowed == bank.features[image]).all(dim=1).any()
            others = [e for e in negatives if e.norm() > 0.5 and not torch.equal(e, bank.features[image])]
            assert len(allowed) == len(others)
        steps.append((negatives @ bank.features.T).argmax(dim=1))  # which entries
        again = filled(0)
        again.load_state_dict(bank.state_dict())
        assert torch.equal(again.negatives(ids, 30)[0], negatives)
        assert not torch.equal(filled(1).negatives(ids, 30)[0], negatives)
        bank.update(bank.features[:1], torch.zeros(1, dtype=torch.long), momentum=0.5)
    assert not torch.equal(steps[0], steps[1])
    everything, excluded = bank.negatives(ids, 50)
    assert torch.equal(everything, bank.features)
    assert excluded.sum(dim=1).tolist() == [11, 11, 11]  # ten empty ones and the image's own


def naive_nce(v, m, negatives, tau):
    """Eq. 3 and 4 of PIRL for one image."""
    positive = torch.exp(v @ m / tau)
    exps = [torch.exp(v @ n / tau) for n in negatives]
    total = positive + sum(exps)
    loss = -torch.log(positive / total)
    for e in exps:
        loss = loss - torch.log(1 - e / total)
    return loss


@pytest.mark.parametrize("layers", [1, 2])
def test_pirl_matches_image_and_patches_with_the_bank(layers):
    method = small("pirl", projector_layers=layers, jigsaw_weight=0.3, bank_momentum=0.6)
    assert isinstance(method, PIRL)
    kept = {}
    for step in range(3):
        views, ids = batch(step)
        reference = copy.deepcopy(method)
        patches = cut_grid(views[1], ids, seed=0, epoch=step, view=1)
        by_patch = [reference.patch_projector[0](row[None])[0] for row in reference.encoder(patches)]
        joined = [torch.cat(by_patch[i * 9 : i * 9 + 9]) for i in range(len(ids))]
        g = unit([reference.patch_projector[2](row) for row in joined])
        f = unit(reference.projector(reference.encoder(views[0])))
        expected = 0
        for i, image in enumerate(ids.tolist()):
            m = kept.get(image, f[i].detach())
            negatives = [entry for other, entry in kept.items() if other != image]
            terms = [naive_nce(v, m, negatives, TAU) for v in (f[i], g[i])]
            expected = expected + (0.7 * terms[0] + 0.3 * terms[1]) / len(ids)
        output = method(views, ids, epoch=step)
        torch.testing.assert_close(output.loss, expected, rtol=1e-10, atol=1e-12)
        output.loss.backward()
        expected.backward()
        assert_same_gradients(method, reference)
        method.after_step(step, 3)
        for i, image in enumerate(ids.tolist()):
            new = f[i].detach()
            kept[image] = unit([0.6 * kept[image] + 0.4 * new])[0] if image in kept else new
    assert float(output.loss.detach()) > 1


def stages_by_hooks(encoder, images):
    """Return the pooled outputs of the four stages, recorded in a normal pass through the encoder."""
    found = []
    handles = [
        getattr(encoder, name).register_forward_hook(lambda *args: found.append(args[2].mean(dim=(2, 3))))
        for name in STAGE_WEIGHTS
    ]
    encoder(images)
    for handle in handles:
        handle.remove()
    return found


def naive_info_nce(q, k, negatives, tau):
    """Eq. 1 of MoCo for one image."""
    positive = torch.exp(q @ k / tau)
    return -torch.log(positive / (positive + sum(torch.exp(q @ n / tau) for n in negatives)))


def test_detco_sums_three_contrasts_over_four_stages():
    method = small("detco", queue_length=10, momentum=0.9)
    assert isinstance(method, DetCo)
    held = []  # id, then the keys of each stage, global and local
    for step in range(3):
        views, ids = batch(step)
        reference = copy.deepcopy(method)
        heads = [*reference.stage_projectors, reference.projector]
        momentum_heads = [*reference.momentum_stage_projectors, reference.momentum_projector]
        networks = (
            (reference.encoder, heads, reference.patch_projectors),
            (reference.momentum_encoder, momentum_heads, reference.momentum_patch_projectors),
        )
        sides = []  # of the query, then of the key: for each stage the global and the local features
        for view, (encoder, global_heads, local_heads) in enumerate(networks):
            patches = cut_grid(views[view], ids, seed=0, epoch=step, view=view)
            whole, parts = stages_by_hooks(encoder, views[view]), stages_by_hooks(encoder, patches)
            stages = []
            for stage in range(4):
                joined = torch.stack([torch.cat(list(parts[stage][i * 9 : i * 9 + 9])) for i in range(len(ids))])
                local = local_heads[stage][1](joined)
                stages.append((unit(global_heads[stage](whole[stage])), unit(local)))
            sides.append(stages)
        expected = 0
        for stage, weight in enumerate((0.1, 0.4, 0.7, 1.0)):
            (q_global, q_local), (k_global, k_local) = (side[stage] for side in sides)
            for i, image in enumerate(ids.tolist()):
                others = [keys[stage] for held_id, keys in held if held_id != image]
                global_queue, local_queue = [keys[0] for keys in others], [keys[1] for keys in others]
                for q, k, queue in (
                    (q_global, k_global, global_queue),
                    (q_local, k_local, local_queue),
                    (q_local, k_global, global_queue),
                ):
                    expected = expected + weight * naive_info_nce(q[i], k[i].detach(), queue, TAU) / len(ids)
        output = method(views, ids, epoch=step)
        torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=1e-9)
        output.loss.backward()
        expected.backward()
        if step:  # before, the queues are empty
            assert_same_gradients(method, reference)
            assert float(output.loss.detach()) > 1
        method.zero_grad()
        for i, image in enumerate(ids.tolist()):
            held.append((image, [(k_global[i].detach(), k_local[i].detach()) for k_global, k_local in sides[1]]))
        held = held[-10:]
        method.after_step(step, 3)
    assert tuple(STAGE_WEIGHTS.values()) == (0.1, 0.4, 0.7, 1.0)
    queues = [*method.stage_queues, method.queue, *method.patch_queues]
    assert len(queues) == 8
    assert all(torch.equal(queue.ids, method.queue.ids) for queue in queues)


@pytest.mark.parametrize("name", ["resnet10-tiny", "resnet18", "resnet26d"])
def test_stages_end_with_the_features_of_the_encoder(name):
    encoder = build_encoder(resolve_encoder(name, image_size=32)).train()
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    widths, before = stage_widths(encoder), copy.deepcopy(encoder.state_dict())
    assert encoder.training
    assert all(torch.equal(value, before[key]) for key, value in encoder.state_dict().items())
    with torch.no_grad():
        features = stage_features(encoder, images)
        torch.testing.assert_close(features[-1], encoder(images))
        for part, expected in zip(features, stages_by_hooks(encoder, images), strict=True):
            torch.testing.assert_close(part, expected)
    assert [part.shape[1] for part in features] == widths


@pytest.mark.parametrize("name", ["pirl", "detco"])
def test_the_encoder_is_exported_without_the_heads_and_saved_once(name):
    config = resolve({"recipe": "demo", "method": name})
    method = build_method(config, encoder_spec(config), images=40)
    plain = build_encoder(encoder_spec(config))
    assert method.exported_encoder.state_dict().keys() == plain.state_dict().keys()
    state = method.state_dict()
    filled = [value for value in state.values() if value.numel()]
    assert len({value.data_ptr() for value in filled}) == len(filled)  # no tensor under two names


@pytest.mark.parametrize("name", ["pirl", "detco"])
def test_running_statistics_are_those_of_the_images(name):
    method = small(name).train()
    images_only = copy.deepcopy(method.encoder)
    views, ids = batch(0)[:2]
    method(views, ids, epoch=0)
    images_only(views[0])
    expected, found = images_only.state_dict(), method.encoder.state_dict()
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], msg=key)


@pytest.mark.parametrize("name", ["pirl", "detco"])
def test_an_encoder_that_cannot_take_patches_is_refused(name):
    config = resolve({"recipe": "demo", "method": name, "encoder": "vit_tiny", "stem": "auto"})
    with pytest.raises(UserError, match=rf"method {name} .*VisionTransformer.*--encoder resnet50"):
        build_method(config, encoder_spec(config), images=40)


def test_the_loss_is_finite_if_a_negative_takes_the_whole_sum():
    from snclr.methods.jigsaw.pirl import nce_loss

    v = torch.tensor([[1.0, 0.0]], requires_grad=True)
    loss = nce_loss(v, -v.detach(), v.detach(), torch.tensor([[False]]), tau=0.01)
    loss.backward()
    assert math.isfinite(float(loss.detach()))
    assert torch.isfinite(v.grad).all()


def test_the_cost_of_detco_is_measured_with_eight_full_queues(tmp_path):
    from PIL import Image

    from snclr.train.planning.cost import measure_cost

    for i in range(16):
        Image.fromarray(np.full((16, 16, 3), 16 * i, np.uint8)).save(tmp_path / f"{i}.png")
    settings = {"recipe": "demo", "method": "detco", "image_size": 16, "hidden": 8, "dim": 6, "queue_length": 30}
    run = {"data": str(tmp_path), "batch_size": 8, "epochs": 8, "workers": 0, "device": "cpu"}
    assert measure_cost({**settings, **run}, steps=6)["queue_mb"] == round(8 * 30 * 6 * 4 / 1e6, 3)
