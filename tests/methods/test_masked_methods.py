"""MAE and CAE: losses against loops, what the encoder may see, and training on images that a correct method learns."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lightly.models.utils import patchify
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from snclr.errors import UserError
from snclr.methods.config import CAEConfig, MAEConfig
from snclr.methods.masked.base import PatchMask, block_masks, random_masks
from snclr.methods.masked.cae import CAE
from snclr.methods.masked.mae import MAE
from snclr.models.encoders import build_encoder, resolve_encoder
from snclr.models.vit import has_plain_patches
from snclr.train.build import build_method, encoder_spec, view_settings
from snclr.train.config import resolve
from snclr.train.optim import build_optimizer
from tests.methods import naive_vit

CLASS = {"mae": MAE, "cae": CAE}
POOLING = [
    {"global_pool": "token"},
    {"global_pool": "avg"},
    {"global_pool": "avg", "class_token": False},
    {"global_pool": "token", "reg_tokens": 2, "no_embed_class": False},
]


def vit(side=12, patch=4, width=16, depth=2, heads=2, seed=0, **options):
    torch.manual_seed(seed)
    return VisionTransformer(
        img_size=side, patch_size=patch, embed_dim=width, depth=depth, num_heads=heads, num_classes=0, **options
    )


def build(name, encoder, seed=0, **options):
    small = {"decoder_dim": 12, "decoder_layers": 1, "decoder_heads": 3} if name == "mae" else {
        "decoder_layers": 1, "regressor_layers": 2
    }  # fmt: skip
    config = {"mae": MAEConfig, "cae": CAEConfig}[name](**small | options)
    return CLASS[name](encoder, encoder.embed_dim, config, seed=seed)


def random_parameters(method):
    """Replace every parameter, so that no bias is 0 and no scale 1."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return method.double()


def images(count=2, side=12):
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(2)).double()


def mask_of(method, ids, epoch):
    if isinstance(method, MAE):
        return random_masks(method.seed, epoch, ids, method.patches, method.visible)
    return block_masks(method.seed, epoch, ids, method.grid, method.visible)


def assert_equals_the_loops(method, naive):
    x, ids = images(), torch.tensor([5, 9])
    parameters = [p for p in method.parameters() if p.requires_grad]
    for epoch in (0, 4):
        loss = method([x], ids, epoch=epoch).loss
        expected = naive(method, x, mask_of(method, ids, epoch).visible.tolist())
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
        found = torch.autograd.grad(loss, parameters)
        wanted = torch.autograd.grad(expected, parameters)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("options", POOLING)
def test_mae_is_the_error_of_the_masked_patches(options):
    assert_equals_the_loops(random_parameters(build("mae", vit(**options))), naive_vit.mae_loss)


def test_mae_without_normalized_pixels_and_with_another_ratio():
    method = random_parameters(build("mae", vit(), normalize_pixels=False, mask_ratio=0.4))
    assert method.visible == 5
    assert_equals_the_loops(method, naive_vit.mae_loss)


@pytest.mark.parametrize("options", POOLING)
def test_cae_is_the_error_of_pixels_and_features(options):
    assert_equals_the_loops(random_parameters(build("cae", vit(**options))), naive_vit.cae_loss)


@pytest.mark.parametrize("projected", [False, True])
def test_cae_with_a_tokenizer_predicts_the_nearest_code(projected, tmp_path):
    codes = torch.randn(6, 48, generator=torch.Generator().manual_seed(3)).double()
    turn = torch.linalg.qr(torch.randn(48, 48, generator=torch.Generator().manual_seed(4)).double()).Q
    tensors = {"codebook": codes @ turn, "projection": turn} if projected else {"codebook": codes}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "codes.safetensors")
    method = random_parameters(build("cae", vit(), tokenizer=str(tmp_path / "codes.safetensors")))
    assert_equals_the_loops(method, partial(naive_vit.cae_loss, codes=codes))
    assert "tokenizer.codebook" in method.state_dict()  # a resumed run does not depend on the content of the file


def test_a_tokenizer_that_does_not_fit_is_an_error(tmp_path):
    path = tmp_path / "codes.safetensors"
    cases = [
        ({"codebook": torch.zeros(6, 47)}, r"patches of 48 numbers"),
        ({"codebook": torch.zeros(1, 48)}, r"V of at least 2"),
        ({"codebook": torch.zeros(6, 5), "projection": torch.zeros(48, 4)}, r"codebook \(V, D\)"),
        ({"codebook": torch.full((6, 48), math.nan)}, "finite"),
        ({"weights": torch.zeros(6, 48)}, "tensors weights; it needs codebook"),
    ]
    for tensors, text in cases:
        save_file(tensors, path)
        with pytest.raises(UserError, match=text):
            build("cae", vit(), tokenizer=str(path))
    path.write_bytes(b"no tensors")
    for bad in (path, tmp_path / "missing.safetensors"):
        with pytest.raises(UserError, match="cannot be read as safetensors"):
            build("cae", vit(), tokenizer=str(bad))


@pytest.mark.parametrize("name", CLASS)
@pytest.mark.parametrize("options", [*POOLING, {"global_pool": "avg", "reg_tokens": 2, "no_embed_class": True}])
def test_with_every_patch_the_tokens_are_those_of_timm(name, options):
    method = random_parameters(build(name, vit(**options)))
    x = images()
    torch.testing.assert_close(
        method.encode_patches(x, torch.arange(9).expand(2, -1)), method.encoder.forward_features(x)
    )


@pytest.mark.parametrize("name", CLASS)
def test_the_prediction_does_not_depend_on_the_masked_pixels(name):
    method = random_parameters(build(name, vit()))
    x, ids = images(), torch.tensor([5, 9])
    mask = mask_of(method, ids, 0)
    predictions = []
    for change in (0.0, 3.0):
        changed = x.clone()
        for image, numbers in zip(changed, mask.masked.tolist(), strict=True):
            for number in numbers:
                top, left = number // 3 * 4, number % 3 * 4
                image[:, top : top + 4, left : left + 4] += change * torch.randn(3, 4, 4).double()
        tokens = method.last_norm(method.encode_patches(changed, mask.visible))
        if name == "mae":
            predictions.append(method.decode(tokens, mask))
        else:
            predictions.append(method.predict_masked(tokens[:, method.prefix_tokens :], mask)[0])
    assert torch.equal(*predictions)
    assert predictions[0].shape == (2, 9 - method.visible, 48)
    assert (predictions[0][:, 0] - predictions[0][:, 1]).abs().max() > 1e-3  # but on the position


@pytest.mark.parametrize("name", CLASS)
@pytest.mark.parametrize("options", POOLING)
def test_the_encoder_is_registered_once_and_every_parameter_is_trained(name, options):
    encoder = vit(**options)
    method = build(name, encoder)
    method([images().float()], torch.tensor([5, 9]), epoch=0).loss.backward()
    assert not [key for key, p in method.named_parameters() if p.requires_grad and p.grad is None]
    state = method.state_dict()
    assert sum(key.startswith("encoder.") for key in state) == len(encoder.state_dict())
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)
    optimizer = build_optimizer("adamw", method.named_parameters(), lr=1.0, weight_decay=0.1, beta2=0.95)
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.95)}
    token = method.decoder.mask_token if name == "mae" else method.mask_token
    assert any(parameter is token for parameter in optimizer.param_groups[1]["params"])  # without weight decay


@pytest.mark.parametrize("name", CLASS)
@pytest.mark.parametrize("encoder", ["resnet10-tiny", "deit_tiny_distilled_patch16_224", "vit_base_patch16_siglip_224"])
def test_an_encoder_without_plain_patches_is_an_error(name, encoder):
    size = 32 if encoder == "resnet10-tiny" else 224
    config = resolve({"recipe": "demo", "method": name, "encoder": encoder, "image_size": size, "stem": "auto"})
    with pytest.raises(UserError, match=f"method {name} masks the patches of a plain ViT, and {encoder} is not one"):
        build_method(config, encoder_spec(config))


def test_plain_patches():
    with torch.device("meta"):
        known = {
            name: has_plain_patches(build_encoder(resolve_encoder(name, image_size=224)))
            for name in (
                "vit_tiny",
                "vit_little_patch16_reg4_gap_256",
                "vit_tiny_r_s16_p8_224",
                "eva02_tiny_patch14_224",
            )
        }
    assert list(known.values()) == [True, True, False, False]


def test_sizes_that_do_not_fit_are_an_error():
    with pytest.raises(UserError, match="one patch"):
        build("mae", vit(side=4))
    with pytest.raises(UserError, match="multiple of 4 and of decoder_heads=5"):
        build("mae", vit(), decoder_dim=12, decoder_heads=5)


def test_settings_follow_the_papers():
    mae = resolve({"recipe": "vit-base-imagenet", "method": "mae"})
    assert (mae.optimizer, mae.lr, mae.beta2, mae.weight_decay, mae.warmup_epochs) == ("adamw", 1.5e-4, 0.95, 0.05, 40)
    assert (mae.mask_ratio, mae.decoder_dim, mae.decoder_layers, mae.decoder_heads) == (0.75, 512, 8, 16)
    cae = resolve({"recipe": "vit-base-imagenet", "method": "cae", "batch_size": 2048})
    assert cae.lr * cae.batch_size / 256 == pytest.approx(1.5e-3)
    assert (cae.clip_gradient, cae.weight_decay, cae.beta2, cae.drop_path) == (3.0, 0.05, 0.999, 0.1)
    lengths = (resolve({"recipe": "vit-base-imagenet", "method": "cae", "epochs": n}) for n in (300, 800, 1600))
    assert [config.warmup_epochs for config in lengths] == [10, 20, 40]
    assert (cae.mask_ratio, cae.regressor_layers, cae.decoder_layers, cae.alignment_weight) == (0.5, 4, 4, 0.05)
    for config, crop in ((mae, 0.2), (cae, 0.08)):
        (view,) = view_settings(config)  # one view: crop and flip
        assert (view.crop_min, view.flip, view.jitter, view.grayscale, view.blur) == (crop, 0.5, 0, 0, 0)
        assert config.sincos
        assert not config.freeze_patch_embed
    small = resolve({"recipe": "photos", "method": "mae", "encoder": "vit_tiny"})
    assert (small.optimizer, small.lr, small.decoder_dim, small.crop_min) == ("adamw", 1e-3, 128, 0.2)
    demo = resolve({"recipe": "demo", "method": "cae", "encoder": "vit_tiny"})
    assert (demo.lr, demo.weight_decay, demo.alignment_weight) == (0.004, 0.01, 0.05)
    for recipe in ("demo", "vit-base-imagenet"):  # the authors' weight is for tokens
        given = {"recipe": recipe, "method": "cae", "tokenizer": "codes.safetensors"}
        assert resolve(given).alignment_weight == 2.0
        assert resolve({**given, "alignment_weight": 0.5}).alignment_weight == 0.5


def fit(method, x, steps, *, lr, batch, fixed_masks=False):
    """Return the loss of each step of a short training."""
    optimizer = build_optimizer("adamw", method.named_parameters(), lr=lr, weight_decay=0.05, beta2=0.95)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 20)
        epoch, start = divmod(step * batch, len(x))
        ids = torch.arange(start, start + batch)
        loss = method([x[ids]], ids, epoch=0 if fixed_masks else epoch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_mae_reconstructs_a_few_images_almost_exactly():
    """Masks stay the same, so the error can become nearly 0; pixels and not only their mean are reconstructed."""
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    method = build("mae", vit(side=8, width=32), decoder_dim=32, decoder_heads=2)
    losses = fit(method, x, 200, lr=0.01, batch=4, fixed_masks=True)
    assert losses[0] > 0.8
    assert losses[-1] < 0.01, losses[::20]


PATTERNS = F.interpolate(torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)), size=16, mode="bicubic")


def patterned(count, seed):
    """Return images of one of eight patterns with random contrast, much stronger random brightness and some noise.

    The brightness decides which images are near each other for an untrained encoder. It does not help to predict
    normalized pixels: the visible patches must show which pattern it is.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(8, (count,), generator=generator)
    brightness = 2 * torch.randn(count, 1, 1, 1, generator=generator)
    contrast = 0.2 + torch.rand(count, 1, 1, 1, generator=generator)
    noise = 0.1 * torch.randn(count, 3, 16, 16, generator=generator)
    return brightness + contrast * PATTERNS[labels] + noise, labels


def knn(encoder, train, test):
    """Return the top-1 of five nearest neighbors by mean-pooled features, centered."""
    (x, y), (queries, labels) = train, test
    with torch.no_grad():
        known, asked = encoder(x), encoder(queries)
    center = known.mean(dim=0)
    similarity = F.normalize(asked - center, dim=1) @ F.normalize(known - center, dim=1).T
    return float((y[similarity.topk(5, dim=1).indices].mode(dim=1).values == labels).float().mean())


def no_positions(method):
    """Break a method: the decoder does not know which masked patch is which."""
    (method.decoder.pos_embed if isinstance(method, MAE) else method.positions).zero_()


def shuffled_targets(method):
    """Break a method: each image has to predict another image's patches."""
    pixels = method.pixels
    generator = torch.Generator().manual_seed(0)
    method.pixels = lambda x, *args, **options: pixels(x[torch.randperm(len(x), generator=generator)], *args, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "break_it"), [("mae", None), ("mae", no_positions), ("mae", shuffled_targets), ("cae", None)]
)
def test_a_correct_method_learns_the_patterns_and_a_broken_one_does_not(name, break_it):
    train, test = patterned(512, 1), patterned(256, 2)
    encoder = vit(side=16, width=48, heads=4, seed=1, global_pool="avg", weight_init="moco")
    sizes = {"decoder_dim": 32, "decoder_layers": 2, "decoder_heads": 4} if name == "mae" else {
        "alignment_weight": 0.05, "regressor_layers": 1
    }  # fmt: skip
    method = build(name, encoder, **sizes)
    if break_it is not None:
        break_it(method)
    before = knn(encoder, train, test)
    losses = fit(method, train[0], 300, lr=0.004, batch=64)
    after, last = knn(encoder, train, test), sum(losses[-8:]) / 8
    learned = last < 0.8 and after > before + 0.2
    assert learned == (break_it is None), (last, before, after)


def tokenizer_of(x, count=32):
    """Return k-means codes of the patches of some images without their brightness, which the projection removes."""
    projection = torch.eye(48) - 1 / 48
    patches = patchify(x, 4).flatten(0, 1) @ projection
    codes = patches[torch.randperm(len(patches), generator=torch.Generator().manual_seed(0))[:count]]
    for _ in range(10):
        token = torch.cdist(patches, codes).argmin(dim=1)
        codes = torch.stack([patches[token == v].mean(dim=0) if (token == v).any() else codes[v] for v in range(count)])
    return {"codebook": codes, "projection": projection}


@pytest.mark.slow
def test_cae_learns_the_patterns_from_tokens_with_the_authors_weight(tmp_path):
    train, test = patterned(512, 1), patterned(256, 2)
    save_file(tokenizer_of(train[0]), tmp_path / "codes.safetensors")
    encoder = vit(side=16, width=48, heads=4, seed=1, global_pool="avg", weight_init="moco")
    tokens = str(tmp_path / "codes.safetensors")
    method = build("cae", encoder, alignment_weight=2.0, regressor_layers=1, tokenizer=tokens)
    before = knn(encoder, train, test)
    losses = fit(method, train[0], 500, lr=0.004, batch=64)  # in the first 200, kNN falls
    after = knn(encoder, train, test)
    assert sum(losses[-8:]) < 0.5 * sum(losses[:8]), losses[::30]
    assert after > before + 0.2, (before, after)


def test_cae_stops_the_gradient_at_the_features_of_the_masked_patches():
    """With one weight, the gradient of the alignment is that of the prediction alone."""
    method = random_parameters(build("cae", vit(), alignment_weight=1.0))
    x, ids = images(), torch.tensor([5, 9])
    mask = mask_of(method, ids, 0)
    weight = method.encoder.patch_embed.proj.weight
    swapped = PatchMask(visible=mask.masked, masked=mask.visible)
    target = method.last_norm(method.encode_patches(x, swapped.visible)[:, method.prefix_tokens :])
    visible = method.last_norm(method.encode_patches(x, mask.visible)[:, method.prefix_tokens :])
    features = method.predict_masked(visible, mask)[1]
    stopped, full = (
        torch.autograd.grad(F.mse_loss(features, part), weight, retain_graph=True)[0]
        for part in (target.detach(), target)
    )
    with_alignment = torch.autograd.grad(method([x], ids, epoch=0).loss, weight)[0]
    object.__setattr__(method.config, "alignment_weight", 0.0)
    without = torch.autograd.grad(method([x], ids, epoch=0).loss, weight)[0]
    torch.testing.assert_close(with_alignment - without, stopped, rtol=1e-8, atol=1e-10)
    assert (full - stopped).abs().max() > 1e-3
