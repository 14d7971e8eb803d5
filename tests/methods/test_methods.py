"""All methods in the same training loop: parts, gradients, learning and resuming."""

import copy
import shutil
import sys
import typing
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from snclr.api.retrieval import explain
from snclr.checkpoint.format import latest_checkpoint
from snclr.data.datasets.base import ArrayDataset
from snclr.data.datasets.builtin import open_demo
from snclr.data.loader import ViewLoader
from snclr.data.transforms.crop import center_crop
from snclr.data.transforms.views import normalize
from snclr.errors import UserError
from snclr.methods.config import METHODS, MethodName
from snclr.runtime.settings import describe
from snclr.train.build import build_method, encoder_spec, view_settings
from snclr.train.config import resolve, settings_for_method
from snclr.train.load_run import load_trained_method
from snclr.train.metrics import read_metrics
from snclr.train.optim import build_optimizer
from snclr.train.pretrain import pretrain
from tests.helpers.noise_images import write_noise
from tests.methods import naive

SMALL = {
    "recipe": "demo", "image_size": 16, "hidden": 32, "dim": 16, "neighbors": 4, "queue_length": 40, "prototypes": 12,
    "momentum": 0.99,
}  # fmt: skip


MASKED = [name for name, config in METHODS.items() if config.masks_patches]
VIT = {name: {"encoder": "vit_tiny", "stem": "auto", "decoder_layers": 1} for name in MASKED}


def small(name, **settings):
    config = resolve(settings_for_method(name, {**SMALL, "method": name, **VIT.get(name, {}), **settings}))
    return build_method(config, encoder_spec(config), classes=5, images=64)


def batch(seed, count=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    views = [torch.randn(count, 3, 16, 16, generator=generator).to(dtype) for _ in range(2)]
    return views, torch.arange(count) + count * seed, torch.arange(count) % 5


def step(method, seed=0, epoch=0, dtype=torch.float32):
    views, ids, labels = batch(seed, dtype=dtype)
    output = method(views, ids, epoch=epoch, labels=labels)
    output.loss.backward()
    return output


def test_every_method_is_registered():
    assert tuple(METHODS) == typing.get_args(MethodName)
    for config in METHODS.values():
        config()  # the defaults are valid
        assert all(describe(config)[name].help for name in config.setting_names())
        assert "(" in config.paper() or config.needs_labels


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_what_the_trainer_uses(name):
    method = small(name)
    assert method.encoders[0] is method.encoder
    start = method.encoder.state_dict()
    for momentum in method.encoders[1:]:
        assert all(torch.equal(value, start[key]) for key, value in momentum.state_dict().items())
        assert not any(p.requires_grad for p in momentum.parameters())
    for number in range(2):
        output = step(method, number, epoch=number)
        assert output.loss.shape == ()
        assert output.features.shape[0] == 8
        assert not output.features.requires_grad
        torch.testing.assert_close(output.features.norm(dim=1), torch.ones(8))
        missing = [key for key, p in method.named_parameters() if p.requires_grad and p.grad is None]
        assert not missing  # on several ranks they are an error
        method.after_step(number, 10)
    if method.queue is not None:
        assert len(method.queue) == 16
    method.eval()
    with torch.no_grad():
        keys = method.target_network(batch(0)[0][0])
    assert keys.shape[0] == 8
    assert small(name).state_dict().keys() == method.state_dict().keys()


@pytest.mark.parametrize("times_2tau", [False, True])
def test_mocov3_equals_snclr_without_neighbors(times_2tau):
    heads = {"projector_layers": 3, "final_bn": True, "predictor_final_bn": True}
    same = {**heads, "temperature": 0.3, "times_2tau": times_2tau}
    soft = small("snclr", sides="neither", momentum_schedule="cosine", **same).double()
    plain = small("mocov3", **same).double()
    assert all(torch.equal(value, soft.state_dict()[name]) for name, value in plain.state_dict().items())
    for number in range(3):  # several steps, to include the EMA updates
        first, second = step(soft, number, dtype=torch.float64), step(plain, number, dtype=torch.float64)
        assert float(first.loss.detach()) == pytest.approx(float(second.loss.detach()), rel=1e-13)
        gradients = dict(plain.named_parameters())
        for name, parameter in soft.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-9, atol=1e-12)
        for method in (soft, plain):
            with torch.no_grad():
                for parameter in method.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
            method.after_step(number, 10)
    with torch.no_grad():  # neighbors change the loss
        views, ids, _ = batch(7, dtype=torch.float64)
        for config in (soft.config, soft.criterion.config):
            object.__setattr__(config, "sides", "both")
        assert abs(float(soft(views, ids, epoch=0).loss - plain(views, ids, epoch=0).loss)) > 1e-3


@pytest.mark.parametrize("view", ["augmented", "plain"])
@pytest.mark.parametrize("space", ["projection", "encoder"])
@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize("agreeing", [False, True])
def test_search_options_equal_the_equations(view, space, unique, agreeing):
    """Loss and gradient of steps with each search against loops over everything that was pushed."""
    options = {
        "search_view": view, "search_space": space, "unique_neighbors": unique, "agreeing_neighbors": agreeing,
        "temperature": 0.3,
    }  # fmt: skip
    if agreeing and view == "plain":
        with pytest.raises(UserError, match="agreeing_neighbors needs the neighbors of two views"):
            small("snclr", **options)
        return
    method = small("snclr", queue_length=20, **options).double()
    target = copy.deepcopy(method)  # follows by hand, so that its passes do not change the method's batch norms
    held: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # id, feature of the loss, feature of the search
    for number in range(3):
        views, ids, _ = batch(number, dtype=torch.float64)
        views.append(views[0].flip(3))
        ids = ids % 11
        target.load_state_dict(method.state_dict())
        with torch.no_grad():
            encoded = [target.momentum_encoder(x) for x in views]
            y2 = [F.normalize(target.momentum_projector(h), dim=1) for h in encoded]
            query = [F.normalize(h, dim=1) for h in encoded] if space == "encoder" else y2
        queued, keys = (torch.stack([part[i] for part in held]) if held else y2[0][:0] for i in (1, 2))
        y1 = [F.normalize(target.projector(target.encoder(x)), dim=1) for x in views[:2]]
        z1 = [F.normalize(target.predictor(target.projector(target.encoder(x))), dim=1) for x in views[:2]]
        expected = torch.zeros((), dtype=torch.float64)
        held_ids = [part[0] for part in held]
        found = [naive.search(query[v], keys, 4, ids.tolist(), held_ids, unique) for v in range(3)]
        for a, b in ((0, 1), (1, 0)):
            picks = found[2 if view == "plain" else b]
            if agreeing:
                images = [{held_ids[i] for i in row} for row in found[a]]
                picks = [[i for i in row if held_ids[i] in images[n]] for n, row in enumerate(picks)]
            expected = expected + naive.snclr_loss(
                y1[a], z1[a], y2[b], queued, picks, tau=0.3, form="inside", sides="both", gamma=1.0, temperature=1.0,
                gradient=False,
            )  # fmt: skip
        output = method(views if view == "plain" else views[:2], ids, epoch=0)
        torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=1e-6)  # the queue is single precision
        output.loss.backward()
        expected.backward()
        gradients = dict(target.named_parameters())
        for name, parameter in method.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-5)
                parameter.grad = gradients[name].grad = None
        pushed = 2 if view == "plain" else 1
        held = [*held, *zip(ids.tolist(), y2[pushed], query[pushed], strict=True)][-20:]
        assert (output.other_found_ids is None) is (view == "plain")
        method.after_step(number, 3)


@pytest.mark.parametrize("name", ["swav", "dino"])
def test_prototypes_are_frozen_in_the_first_epoch(name):
    method = small(name)
    step(method, epoch=0)
    assert float(method.prototypes.weight.grad.abs().sum()) == 0
    step(method, epoch=1)
    assert float(method.prototypes.weight.grad.abs().sum()) > 0


def test_supervised_needs_labels_of_two_classes():
    config = resolve({"recipe": "demo", "method": "supervised", "data": "my-photos"})
    with pytest.raises(UserError, match="my-photos has none"):
        build_method(config, encoder_spec(config))
    with pytest.raises(UserError, match="two or more"):
        build_method(config, encoder_spec(config), classes=1)
    views, ids, _ = batch(0)
    with pytest.raises(UserError, match="labels"):
        small("supervised")(views, ids, epoch=0)


_audit_events: list[str] = []
_auditing = False


def _audit(event, arguments):
    if _auditing and (event.startswith("socket.") or event in ("_thread.start_new_thread", "subprocess.Popen")):
        _audit_events.append(event)


def test_lightly_opens_no_connection_and_starts_no_thread():
    global _auditing
    before = set(sys.modules)
    loaded = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "lightly"}
    sys.addaudithook(_audit)
    _auditing = True
    try:
        for name in METHODS:
            step(small(name))
    finally:
        _auditing = False
        sys.modules.update(loaded)
    assert "lightly" in sys.modules
    assert _audit_events == []
    assert not {"pytorch_lightning", "hydra"} & (set(sys.modules) - before)  # installed with lightly, not imported


SIDE, BATCH, EPOCHS = 16, 64, 4
LR = {"swav": 0.01}  # its paper's learning rate is also higher; with less it stays at chance for longer


@pytest.fixture(scope="module")
def demo_images():
    """Return 2,048 demo images to train on, and all test images with their labels."""
    train, test = open_demo("train"), open_demo("test")
    dataset = ArrayDataset("subset", train.images[:2048], train.labels[:2048], train.classes)
    test_images = normalize(np.stack([center_crop(image, SIDE) for image in test.images]))
    return dataset, test_images, torch.from_numpy(test.labels)


def knn(encoder, images, labels):
    """Return the leave-one-out top-1 of ten nearest neighbors.

    Batch norms use the statistics of these images: running statistics alone, without learning, gain three points.
    """
    with torch.no_grad():
        features = F.normalize(copy.deepcopy(encoder).train()(images), dim=1)
    similarity = (features @ features.T).fill_diagonal_(-2)
    return float((labels[similarity.topk(10, dim=1).indices].mode(dim=1).values == labels).float().mean())


def train_briefly(name, demo_images, seed=0):
    """Return kNN top-1 before and after 128 steps, and the mean loss of each epoch."""
    dataset, test_images, labels = demo_images
    settings = {
        **SMALL, "method": name, "image_size": SIDE, "hidden": 128, "dim": 64, "prototypes": 16, "batch_size": BATCH,
        "epochs": EPOCHS, "momentum": 0.9 if name == "byol" else 0.99, "temperature": 0.1,
        "teacher_temperature": 0.04, "redundancy_weight": 0.005, "seed": seed,
    }  # fmt: skip
    config = resolve(settings_for_method(name, settings))
    method = build_method(config, encoder_spec(config), classes=5, images=len(dataset))
    optimizer = build_optimizer("adamw", method.named_parameters(), lr=LR.get(name, 0.003), weight_decay=0.01)
    loader = ViewLoader(
        dataset, views=view_settings(config), image_size=SIDE, batch_size=BATCH, seed=seed, workers=0, rank=0,
        world_size=1, device=torch.device("cpu"), max_bad_share=0.1,
    )  # fmt: skip
    before, losses = knn(method.encoder, test_images, labels), []
    total = EPOCHS * loader.steps_per_epoch
    for part in loader.batches(0, total):
        output = method(part.views, part.ids, epoch=part.epoch, labels=part.labels)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        method.after_step(part.step, total)
        losses.append(float(output.loss.detach()))
    return before, knn(method.encoder, test_images, labels), np.reshape(losses, (EPOCHS, -1)).mean(axis=1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name not in MASKED])  # they: test_masked_methods.py
def test_every_method_learns_from_images(name, demo_images):
    before, after, losses = train_briefly(name, demo_images)
    first = 1 if name in ("moco", "mocov2", "pirl", "detco") else 0  # their loss is 0 until there are negatives
    assert losses[-1] < losses[first], losses
    assert after > before + 0.01, (before, after)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return str(write_noise(tmp_path_factory.mktemp("images"), 16))


OPTIONS = [
    ("snclr", {"search_view": "plain", "search_space": "encoder", "unique_neighbors": True, "gamma": "pull"}),
    ("snclr", {"negatives": "both-views", "sides": "other-negatives", "momentum": 0.0, "predictor_layers": 0}),
    ("mocov2", {"symmetric": True}),
    ("byol", {"encoder": "test_vit", "stem": "auto", "micro_batch": 3, "drop_path": 0.3}),
    ("byol", {"activation_checkpointing": True}),
    ("pirl", {"bank_negatives": 5, "projector_layers": 2}),
    ("cae", {"tokenizer": "codes.safetensors"}),
    ("swav", {"assignment_queue": 8, "assignment_queue_start": 0, "local_crops": 2, "local_size": 8}),
    ("dino", {
        "encoder": "vit_tiny", "local_crops": 3, "local_size": 8, "drop_path": 0.3, "norm_last_layer": False,
        "weight_decay_end": 0.4, "clip_gradient": 3.0, "stem": "auto",
    }),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in METHODS), *OPTIONS])
def test_a_run_resumed_from_an_earlier_checkpoint_is_bit_identical(name, options, images, tmp_path):
    settings = {
        **SMALL, "method": name, "encoder": "resnet10-tiny", "batch_size": 8, "epochs": 2, "warmup_epochs": 1,
        "queue_length": 20, "prototypes": 6, "log_every": 1, "workers": 0, "device": "cpu", "threads": 1,
        "checkpoint_every": 1, "keep_checkpoints": 9, **VIT.get(name, {}), **options,
    }  # fmt: skip
    if "tokenizer" in options:
        settings["tokenizer"] = str(tmp_path / options["tokenizer"])
        save_file({"codebook": torch.randn(9, 12, generator=torch.Generator().manual_seed(0))}, settings["tokenizer"])
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    pretrain(quiet=True, data=images, out=str(whole), **settings_for_method(name, settings))
    shutil.copytree(whole, cut)
    for later in sorted((cut / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(later)
    (cut / "encoder.safetensors").unlink()
    result = pretrain(quiet=True, out=str(cut), resume=True)
    assert result.step == result.total_steps
    expected, resumed = (latest_checkpoint(run / "checkpoints", warn=pytest.fail) for run in (whole, cut))
    assert resumed.step == expected.step == 4
    assert resumed.tensors.keys() == expected.tensors.keys()
    for key, value in expected.tensors.items():
        assert torch.equal(resumed.tensors[key], value), key
    lines = [[{**line, "timing": None} for line in read_metrics(run)] for run in (whole, cut)]
    assert lines[0] == lines[1]
    assert (cut / "encoder.safetensors").read_bytes() == (whole / "encoder.safetensors").read_bytes()
    method, config = load_trained_method(cut)
    assert config.method == name
    assert all(torch.equal(value, resumed.tensors[f"method/{key}"]) for key, value in method.state_dict().items())
    if name != "snclr":
        with pytest.raises(UserError, match=f"method='{name}'"):
            pretrain(quiet=True, out=str(cut), resume=True, method="snclr")
        with pytest.raises(UserError, match="explain needs a run of --method snclr"):
            explain(cut, next(Path(images).rglob("*.png")))
