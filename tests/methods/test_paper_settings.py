"""The values of the methods' papers and official code, from the settings to what a run computes with them."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from snclr.checkpoint.format import latest_checkpoint
from snclr.data.transforms.randaugment import OPERATIONS, PYCONTRAST
from snclr.data.transforms.views import VIEW_GROUPS
from snclr.methods.barlowtwins import redundancy_weight
from snclr.methods.config import METHODS
from snclr.methods.paper_settings import Setup, nearest_length, paper_settings
from snclr.train.build import build_method, build_task, encoder_spec
from snclr.train.config import resolve, settings_for_method
from snclr.train.load_run import load_trained_method
from snclr.train.pretrain import launch_run, pretrain

PAPER = "resnet50-imagenet"
SMALL = {
    "recipe": "demo", "image_size": 16, "hidden": 12, "dim": 8, "prototypes": 6, "queue_length": 20, "momentum": 0.9,
    "batch_size": 8,
}  # fmt: skip


def small(method, **settings):
    config = resolve(settings_for_method(method, {**SMALL, "method": method, **settings}))
    return build_method(config, encoder_spec(config), classes=3, images=30)


def at_paper_scale(method, **settings):
    return resolve({"recipe": PAPER, "method": method, **settings})


def linear_layers(head):
    return [part for part in head if isinstance(part, nn.Linear)]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for i in range(16):
        pixels = generator.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return str(folder)


def steps(images, method, count, **settings):
    """Yield the task before its first and after each training step."""
    run = {"data": images, "out": "unused", "epochs": 2, "warmup_epochs": 1, "workers": 0, "device": "cpu"}
    config = resolve(settings_for_method(method, {**SMALL, "method": method, **run, **settings}))
    task = build_task(config, launch_run(config))
    yield task, None
    for batch in task.loader.batches(0, count):
        _, lr, _ = task.training_step(batch)
        yield task, lr


@pytest.mark.parametrize(
    ("method", "run", "expected"),
    [
        ("simclr", {}, {"temperature": 0.1, "views": "simclr", "final_bn": True, "final_scale": True}),
        ("simclr", {"recipe": "cifar"}, {"temperature": 0.5, "views": "cifar"}),
        ("mocov2", {"views": "infomin"}, {"temperature": 0.15}),
        ("mocov2", {}, {"temperature": 0.2, "symmetric": False}),
        ("mocov3", {"epochs": 100}, {"lr": 0.6, "weight_decay": 1e-6, "momentum": 0.99, "crop_min": 0.2}),
        ("mocov3", {"epochs": 1000}, {"lr": 0.3, "weight_decay": 1.5e-6, "momentum": 0.996, "temperature": 1.0}),
        ("mocov3", {"recipe": "vit-small-imagenet"},
         {"temperature": 0.2, "projector_layers": 3, "predictor_final_bn": True, "weight_decay_on": "all"}),
        ("byol", {"epochs": 1000}, {"lr": 0.2, "weight_decay": 1.5e-6, "momentum": 0.996}),
        ("byol", {"epochs": 300}, {"lr": 0.3, "weight_decay": 1e-6, "momentum": 0.99}),
        ("byol", {"recipe": "cifar"}, {"lr": 0.06, "momentum": "auto"}),
        ("swav", {"batch_size": 256}, {"assignment_queue": 3840, "assignment_queue_start": 15}),
        ("swav", {"batch_size": 4096}, {"assignment_queue": 0}),
        ("swav", {"batch_size": 4096, "local_crops": 6}, {"crop_min": 0.14}),
        ("dino", {}, {"crop_min": 0.14, "clip_gradient": 3.0, "lr": 0.3}),
        ("dino", {"recipe": "vit-small-imagenet", "local_crops": 10},
         {"crop_min": 0.4, "lr": 5e-4, "weight_decay": 0.04, "weight_decay_end": 0.4, "warmup_epochs": 10,
          "drop_path": 0.1, "sincos": False, "freeze_patch_embed": False, "heads": None}),
    ],
)  # fmt: skip
def test_values_are_those_of_the_paper_or_its_official_code(method, run, expected):
    config = at_paper_scale(method, **run)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(("method", "given"), [("simclr", {"views": "byol"}), ("mocov3", {"lr": 0.7, "epochs": 100})])
def test_a_given_setting_replaces_the_value_of_the_paper(method, given):
    config = at_paper_scale(method, **given)
    assert {name: getattr(config, name) for name in given} == given


def test_a_method_without_such_values_takes_those_of_its_config():
    setup = Setup(
        encoder="resnet50", image_size=224, epochs=100, batch_size=4096, views="byol", prototypes=512, local_crops=0,
        optimizer="lars", tokenizer=None, paper_scale=True,
    )  # fmt: skip
    assert paper_settings("nnclr", setup) == paper_settings("snclr", setup) == {}


def test_the_nearest_length_of_training_is_by_ratio():
    by_epochs = {40: "a", 100: "b", 300: "c", 1000: "d"}
    assert [nearest_length(by_epochs, n) for n in (1, 63, 64, 170, 180, 540, 560, 4000)] == list("aabbccdd")


@pytest.mark.parametrize(
    ("encoder", "layers", "predictor_bn", "temperature"), [("resnet10-tiny", 2, False, 1.0), ("vit_tiny", 3, True, 0.2)]
)
def test_mocov3_has_the_heads_of_its_encoder(encoder, layers, predictor_bn, temperature):
    method = small("mocov3", encoder=encoder, stem="auto")
    assert method.config.temperature == temperature
    assert len(linear_layers(method.projector)) == layers
    assert isinstance(method.projector[-1], nn.BatchNorm1d)
    assert not method.projector[-1].affine
    assert len(linear_layers(method.predictor)) == 2
    assert isinstance(method.predictor[-1], nn.BatchNorm1d) == predictor_bn
    assert all(layer.bias is None for layer in (*linear_layers(method.projector), *linear_layers(method.predictor)))


def test_simclr_ends_with_a_batch_norm_that_has_a_scale_and_no_shift():
    last = small("simclr").projector[-1]
    assert isinstance(last, nn.BatchNorm1d)
    assert last.weight.requires_grad
    assert not last.bias.requires_grad
    assert float(last.bias.abs().max()) == 0


def test_simclr_has_its_temperature_and_colors_by_image_size():
    assert resolve({"recipe": "cifar", "method": "simclr"}).temperature == 0.5
    assert (at_paper_scale("simclr").temperature, at_paper_scale("simclr").views) == (0.1, "simclr")
    full, half = VIEW_GROUPS["simclr"][0], VIEW_GROUPS["simclr-cifar"][0]
    for name in ("brightness", "contrast", "saturation", "hue"):
        assert getattr(half, name) == getattr(full, name) / 2
    assert half.blur == 0


@pytest.mark.parametrize(
    ("epochs", "lr", "decay", "momentum"),
    [(40, 0.45, 1e-6, 0.97), (100, 0.45, 1e-6, 0.99), (300, 0.3, 1e-6, 0.99), (1000, 0.2, 1.5e-6, 0.996)],
)
def test_byol_follows_the_length_of_training(epochs, lr, decay, momentum):
    c = at_paper_scale("byol", epochs=epochs, warmup_epochs=10)
    assert (c.lr, c.weight_decay, c.momentum) == (lr, decay, momentum)
    assert at_paper_scale("byol", epochs=epochs, lr=0.1).lr == 0.1  # a given value replaces it


@pytest.mark.parametrize("name", ["byol", "snclr"])
def test_the_last_layer_of_byols_heads_has_no_bias(name):
    method = small(name)
    assert linear_layers(method.projector)[-1].bias is None
    assert linear_layers(method.predictor)[-1].bias is None


def test_symmetric_mocov2_adds_the_other_direction_and_pushes_both_views():
    one, both = (small("mocov2", symmetric=symmetric).double() for symmetric in (False, True))
    both.load_state_dict(one.state_dict())
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        views = [torch.randn(8, 3, 16, 16, generator=generator, dtype=torch.float64) for _ in range(2)]
        ids = torch.arange(8) + 8 * step
        directions = []
        for pair in (views, views[::-1]):
            method = copy.deepcopy(one)
            method.load_state_dict(both.state_dict())
            directions.append(method(pair, ids, epoch=0).loss)
        loss = both(views, ids, epoch=0).loss
        torch.testing.assert_close(loss, sum(directions), rtol=1e-12, atol=1e-12)
        assert step == 0 or float(loss.detach()) > 1
        both.after_step(step, 3)
        assert len(both.queue) == min(20, 16 * (step + 1))
    assert both.queue.ids.sort().values.tolist() == sorted([*range(16, 24), *range(16, 24), *range(12, 16)])


def test_mocos_have_their_views_and_optimizer_at_paper_scale():
    moco, second = at_paper_scale("moco"), at_paper_scale("mocov2")
    assert (moco.projector_layers, moco.temperature, moco.dim, moco.queue_length, moco.momentum) == (
        1, 0.07, 128, 65_536, 0.999,
    )  # fmt: skip
    assert (second.projector_layers, second.hidden, second.temperature) == (2, 2048, 0.2)
    assert (moco.views, second.views, at_paper_scale("detco").views, at_paper_scale("pirl").views) == (
        "moco", "mocov2", "mocov2", "pirl",
    )  # fmt: skip
    for method in ("moco", "mocov2", "pirl", "detco"):
        c = at_paper_scale(method)
        assert (c.optimizer, c.lr, c.weight_decay) == ("sgd", 0.03, 1e-4)
        vit = resolve({"recipe": "vit-small-imagenet", "method": method})
        assert (vit.optimizer, vit.lr) == ("adamw", 1.5e-4)
    for view in VIEW_GROUPS["moco"]:
        assert (view.crop_min, view.jitter, view.grayscale, view.blur, view.solarize) == (0.2, 1.0, 0.2, 0.0, 0.0)
        assert (view.brightness, view.contrast, view.saturation, view.hue) == (0.4, 0.4, 0.4, 0.4)
    for view in VIEW_GROUPS["mocov2"]:
        assert (view.crop_min, view.jitter, view.grayscale, view.blur, view.hue) == (0.2, 0.8, 0.2, 0.5, 0.1)
    assert [view.crop_min for view in VIEW_GROUPS["pirl"]] == [0.08, 0.6]
    head = small("moco").projector
    assert [type(part) for part in head] == [nn.Linear]


def test_pirl_has_its_papers_values():
    c = at_paper_scale("pirl")
    assert (c.dim, c.temperature, c.bank_negatives, c.bank_momentum, c.jigsaw_weight) == (128, 0.07, 32_000, 0.5, 0.5)
    method = small("pirl")
    assert [type(part) for part in method.projector] == [nn.Linear]
    assert [layer.in_features for layer in method.patch_projector.modules() if isinstance(layer, nn.Linear)] == [
        method.projector[0].in_features, 9 * 8,
    ]  # fmt: skip


@pytest.mark.parametrize(("dim", "weight"), [(8192, 0.0051), (1024, 0.0408), (256, 0.1632)])
def test_barlow_twins_weighs_redundancy_by_the_dimension(dim, weight):
    method = small("barlowtwins", dim=dim)
    assert redundancy_weight(method.config) == pytest.approx(weight, rel=1e-12)
    assert method.criterion.lambda_param == redundancy_weight(method.config)


def test_swav_has_a_queue_if_the_batch_has_fewer_images_than_there_are_prototypes():
    c = at_paper_scale("swav", batch_size=256)
    assert (c.prototypes, c.assignment_queue, c.assignment_queue_start) == (3000, 3840, 15)
    assert at_paper_scale("swav", batch_size=4096).assignment_queue == 0
    for recipe, batch in itertools.product(("demo", "cifar", "photos"), (32, 96, 512)):
        c = resolve({"recipe": recipe, "method": "swav", "batch_size": batch})
        assert c.assignment_queue % batch == 0
        assert c.batch_size + c.assignment_queue >= c.prototypes


def sinkhorn(scores):
    """Return the codes of rows (n, P): every prototype gets an equal share of the rows."""
    codes = (scores / 0.05).exp()
    codes = codes / codes.sum()
    for _ in range(3):
        codes = codes / codes.sum(dim=0, keepdim=True) / scores.shape[1]
        codes = codes / codes.sum(dim=1, keepdim=True) / len(scores)
    return codes * len(scores)


def test_swav_assigns_the_batch_together_with_the_queue_and_local_crops_predict_both_codes():
    method = small("swav", assignment_queue=16, assignment_queue_start=1, local_crops=2, local_size=8).double()
    generator = torch.Generator().manual_seed(0)
    earlier = [torch.zeros(0, 8, dtype=torch.float64) for _ in range(2)]
    for step, epoch in enumerate((0, 1, 1, 1)):
        sizes = (16, 16, 8, 8)
        views = [torch.randn(8, 3, size, size, generator=generator, dtype=torch.float64) for size in sizes]
        reference = copy.deepcopy(method)
        with torch.no_grad():
            y = [nn.functional.normalize(reference.projector(reference.encoder(view)), dim=1) for view in views]
            rows = nn.functional.normalize(reference.prototypes.weight, dim=1)
        total = 0.0
        for code_of in (0, 1):
            together = y[code_of] if len(earlier[0]) < 16 else torch.cat([y[code_of], earlier[code_of]])
            codes = sinkhorn(together @ rows.T)[:8]
            for other in {0, 1, 2, 3} - {code_of}:
                log_p = (y[other] @ rows.T / 0.1).log_softmax(dim=1)
                total -= float((codes * log_p).sum(dim=1).mean()) / 3 / 2
        output = method(views, torch.arange(8), epoch=epoch)
        assert float(output.loss.detach()) == pytest.approx(total, rel=1e-6), step
        method.after_step(step, 4)
        if epoch >= 1:
            earlier = [torch.cat([y[v], earlier[v]])[:16] for v in (0, 1)]
    assert len(earlier[0]) == 16


def test_dino_matches_every_crop_with_the_teachers_other_views():
    method = small("dino", local_crops=2, local_size=8, teacher_warmup_epochs=0, teacher_temperature=0.05).double()
    with torch.no_grad():
        for parameter in method.projector.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(4))
        method.momentum_projector.load_state_dict(method.projector.state_dict())
    generator = torch.Generator().manual_seed(0)
    views = [torch.randn(8, 3, s, s, generator=generator, dtype=torch.float64) for s in (16, 16, 8, 8)]
    reference = copy.deepcopy(method)
    with torch.no_grad():
        teacher = [
            reference.momentum_prototypes(reference.momentum_projector(reference.momentum_encoder(view)))
            for view in views[:2]
        ]
        student = [reference.prototypes(reference.projector(reference.encoder(view))) for view in views]
    pairs = [(t, s) for t in range(2) for s in range(4) if t != s]
    total = 0.0
    for t, s in pairs:
        target = (teacher[t] / 0.05).softmax(dim=1)
        total -= float((target * (student[s] / 0.1).log_softmax(dim=1)).sum(dim=1).mean()) / len(pairs)
    assert float(method(views, torch.arange(8), epoch=0).loss.detach()) == pytest.approx(total, rel=1e-6)


def test_dino_of_a_vit_at_paper_scale():
    c = resolve({"recipe": "vit-small-imagenet", "method": "dino"})
    assert (c.lr, c.weight_decay, c.weight_decay_end, c.clip_gradient, c.drop_path) == (5e-4, 0.04, 0.4, 3.0, 0.1)
    assert (c.local_crops, c.crop_min, c.norm_last_layer, c.exported) == (0, 0.14, True, "teacher")
    assert resolve({"recipe": "vit-small-imagenet", "method": "dino", "local_crops": 8}).crop_min == 0.4
    method = small("dino", encoder="vit_tiny", stem="auto", drop_path=0.1, norm_last_layer=False)
    rates = [[getattr(b.drop_path1, "drop_prob", 0.0) for b in e.blocks] for e in method.encoders]
    assert max(rates[0]) == pytest.approx(0.1)
    assert set(rates[1]) == {0.0}  # the teacher skips no block
    assert method.prototypes.scale.requires_grad
    assert small("dino").prototypes.scale is None


@pytest.mark.parametrize("exported", ["teacher", "student"])
def test_the_teacher_of_dino_is_saved_evaluated_and_exported(exported, images, tmp_path):
    from safetensors.torch import load_file

    settings = settings_for_method("dino", {**SMALL, "method": "dino", "encoder": "resnet10-tiny"})
    settings |= {"epochs": 2, "workers": 0, "device": "cpu", "threads": 1, "exported": exported, "lr": 0.1}
    pretrain(quiet=True, data=images, out=str(tmp_path / "run"), **settings)
    saved = load_file(tmp_path / "run" / "encoder.safetensors")
    tensors = latest_checkpoint(tmp_path / "run" / "checkpoints", warn=pytest.fail).tensors
    names = {"teacher": "momentum_encoder", "student": "encoder"}
    for which, child in names.items():
        equal = all(torch.equal(value, tensors[f"method/{child}.{key}"]) for key, value in saved.items())
        assert equal == (which == exported)
    method, _ = load_trained_method(tmp_path / "run")
    assert method.exported_encoder is (method.momentum_encoder if exported == "teacher" else method.encoder)


def test_weight_decay_rises_along_a_cosine(images):
    found = []
    for task, lr in steps(images, "dino", 4, weight_decay=0.04, weight_decay_end=0.4):
        if lr is not None:
            found.append([group["weight_decay"] for group in task.optimizer.param_groups])
    expected = [0.04 + 0.36 * (1 - math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    assert [decayed for decayed, _ in found] == pytest.approx(expected)
    assert {spared for _, spared in found} == {0.0}


@pytest.mark.parametrize("fixed", [True, False])
def test_simsiam_keeps_the_learning_rate_of_its_predictor(fixed, images):
    for task, lr in steps(images, "simsiam", 4, lr=0.5, fix_predictor_lr=fixed):
        rates = {id(p): group["lr"] for group in task.optimizer.param_groups for p in group["params"]}
        peak = 0.5 * 8 / 256
        for name, parameter in task.module.named_parameters():
            if lr is not None:
                constant = fixed and name.startswith("predictor")
                assert rates[id(parameter)] == pytest.approx(peak if constant else lr), name
    assert lr is not None
    assert lr < peak


def test_simsiam_has_its_papers_sizes_at_paper_scale():
    c = at_paper_scale("simsiam")
    assert (c.hidden, c.dim, c.projector_layers) == (2048, 2048, 3)
    spec = encoder_spec(resolve({"recipe": "demo"}))  # the heads do not need the large encoder
    method = build_method(resolve({"recipe": "demo", "method": "simsiam", "dim": 2048}), spec)
    assert [layer.out_features for layer in linear_layers(method.predictor)] == [512, 2048]


def test_infomin_follows_the_code_of_its_authors():
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(3, 1, 1)
    assert torch.equal(PYCONTRAST["solarize"](pixels, 1.0, 1.0), pixels)  # nothing reaches their level at full strength
    assert not torch.equal(OPERATIONS["solarize"](pixels, 1.0, 1.0), pixels)
    for sign in (1.0, -1.0):  # a factor of 1.9, never below 1
        brighter = (pixels.float() * 1.9).clamp(max=255)
        assert float((PYCONTRAST["brightness"](pixels, 1.0, sign).float() - brighter).abs().max()) <= 1
    assert all(view.pycontrast and view.randaugment == 0.5 for view in VIEW_GROUPS["infomin"])
    assert resolve({"recipe": "photos", "method": "mocov2", "views": "infomin"}).temperature == 0.15
    assert resolve({"recipe": "photos", "method": "mocov2"}).temperature == 0.2


def test_residual_branches_start_at_zero_in_every_method():
    assert all(resolve({"recipe": "demo", "method": method}).zero_init_residual for method in METHODS)
    for encoder in small("moco", encoder="resnet18").encoders:
        assert all(not block.bn2.weight.any() for block in encoder.layer3)


def test_weight_decay_spares_norms_and_biases_except_in_mocov3_with_a_vit():
    for method in METHODS:
        for recipe in (PAPER, "vit-small-imagenet", "demo"):
            everything = method == "mocov3" and recipe == "vit-small-imagenet"
            assert resolve({"recipe": recipe, "method": method}).weight_decay_on == ("all" if everything else "weights")
