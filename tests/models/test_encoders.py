"""Encoders by name: shapes, stems, ViT options, and the validation of saved descriptions."""

import json
import math

import pytest
import torch
from torch import nn

from snclr.errors import UserError
from snclr.models.encoders import EncoderSpec, build_encoder, list_encoders, resolve_encoder
from snclr.models.vit import head_count, sincos_positions


def features(name: str, image_size: int, **options) -> tuple[EncoderSpec, nn.Module, torch.Tensor]:
    spec = resolve_encoder(name, image_size=image_size, **options)
    encoder = build_encoder(spec).eval()
    with torch.no_grad():
        out = encoder(torch.randn(2, 3, image_size, image_size, generator=torch.Generator().manual_seed(0)))
    return spec, encoder, out


@pytest.mark.parametrize(
    ("name", "image_size", "library", "width"),
    [
        ("resnet18", 32, "torchvision", 512),
        ("resnet50", 64, "torchvision", 2048),
        ("resnet10-narrow", 32, "timm", 256),
        ("resnet10-tiny", 32, "timm", 128),
        ("resnet10-tiny", 96, "timm", 128),
        ("vit_tiny", 32, "timm", 192),
        ("vit4-tiny", 32, "timm", 64),
        ("vit_tiny_patch16_224", 64, "timm", 192),
        ("convnext_atto", 64, "timm", 320),
        ("mobilenetv3_small_050", 64, "timm", 1024),  # timm's num_features is 288, the layer before the head
    ],
)
def test_encoders_are_built_by_name_without_a_classifier(name, image_size, library, width):
    spec, encoder, out = features(name, image_size)
    assert spec.library == library
    assert out.shape == (2, spec.num_features) == (2, width)
    assert not any(key.startswith(("fc.", "head.fc", "classifier.")) for key in encoder.state_dict())


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnet10-tiny"])
def test_residual_branches_that_start_at_zero_make_each_block_the_identity(name):
    spec = resolve_encoder(name, image_size=32)
    torch.manual_seed(0)
    before = build_encoder(spec).state_dict()
    torch.manual_seed(0)
    encoder = build_encoder(spec, zero_init_residual=True)
    blocks = [block for layer in (encoder.layer1, encoder.layer4) for block in layer if block.downsample is None]
    for block in blocks:
        inputs = torch.rand(2, block.conv1.in_channels, 4, 4)
        torch.testing.assert_close(block(inputs), inputs)
    changed = {
        key
        for key, value in encoder.state_dict().items()
        if "running" not in key and "num_b" not in key and not torch.equal(value, before[key])
    }
    last = "bn3" if name == "resnet50" else "bn2"
    assert all(key.endswith(f"{last}.weight") for key in changed)
    assert bool(changed) is (name != "resnet10-tiny")  # timm's own initialization


def test_resolving_consumes_no_randomness():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    resolve_encoder("vit_tiny", image_size=32, sincos=True)
    resolve_encoder("resnet18", image_size=32)
    assert torch.equal(torch.get_rng_state(), before)


def test_equal_seeds_give_equal_weights():
    spec = resolve_encoder("resnet10-tiny", image_size=32)
    torch.manual_seed(7)
    first = build_encoder(spec).state_dict()
    torch.manual_seed(7)
    second = build_encoder(spec).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert first["conv1.weight"].std() > 0


@pytest.mark.parametrize(
    ("image_size", "stem", "expected", "kernel", "stride", "pooled"),
    [
        (64, "auto", "small", 3, 1, False),
        (65, "auto", "standard", 7, 2, True),
        (224, "auto", "standard", 7, 2, True),
        (32, "standard", "standard", 7, 2, True),
        (32, "half", "half", 3, 2, False),
        (128, "small", "small", 3, 1, False),
    ],
)
def test_stems_of_a_resnet(image_size, stem, expected, kernel, stride, pooled):
    spec = resolve_encoder("resnet18", image_size=image_size, stem=stem)
    assert spec.stem == expected
    encoder = build_encoder(spec)
    assert encoder.conv1.kernel_size == (kernel, kernel)
    assert encoder.conv1.stride == (stride, stride)
    assert isinstance(encoder.maxpool, nn.MaxPool2d) == pooled
    assert encoder.conv1.bias is None


@pytest.mark.parametrize("stem", ["small", "half"])
def test_the_stem_determines_the_resolution_of_the_first_block(stem):
    encoder = build_encoder(resolve_encoder("resnet10-narrow", image_size=32, stem=stem))
    sizes = []
    encoder.layer1.register_forward_hook(lambda module, args, output: sizes.append(args[0].shape))
    encoder(torch.zeros(2, 3, 32, 32))
    side = 32 if stem == "small" else 16
    assert sizes == [(2, 32, side, side)]


def test_stems_apply_to_timms_resnets_and_are_refused_for_other_models():
    assert resolve_encoder("resnet26", image_size=32).stem == "small"
    assert resolve_encoder("convnext_atto", image_size=64).stem == "standard"
    with pytest.raises(UserError, match="convnext_atto has its own stem"):
        resolve_encoder("convnext_atto", image_size=64, stem="small")
    with pytest.raises(UserError, match="auto, standard, small, half"):
        resolve_encoder("resnet18", image_size=32, stem="tiny")


@pytest.mark.parametrize("name", ["resnet18", "resnet10-tiny", "vit_tiny", "vit4-tiny", "convnext_atto"])
def test_channels_last_gives_the_same_features(name):
    _, encoder, expected = features(name, 32)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    encoder = encoder.to(memory_format=torch.channels_last)
    with torch.no_grad():
        out = encoder(images.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["resnet10-tiny", "vit_tiny"])
def test_every_parameter_gets_a_gradient(name):
    encoder = build_encoder(resolve_encoder(name, image_size=32))
    # Residual branches start at zero in some libraries, which hides the layers before them from the first gradient.
    for module in encoder.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
    weights = torch.randn(4, encoder.num_features)
    (encoder(torch.randn(4, 3, 32, 32)) * weights).sum().backward()
    assert [name for name, p in encoder.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize(
    ("image_size", "patch"), [(224, 16), (128, 16), (640, 16), (96, 8), (64, 8), (48, 4), (32, 4), (28, 2)]
)
def test_short_vit_names_adapt_the_patch_size(image_size, patch):
    spec = resolve_encoder("vit_tiny", image_size=image_size)
    assert spec.model_args["patch_size"] == patch
    assert spec.model_args["img_size"] == image_size


def test_vit_feature_is_the_class_token():
    spec, encoder, out = features("vit_tiny", 32)
    assert spec.model_args["global_pool"] == "token"
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        tokens = encoder.forward_features(images)
    assert tokens.shape == (2, 65, 192)
    torch.testing.assert_close(out, tokens[:, 0])


@pytest.mark.parametrize(
    ("name", "image_size", "message"),
    [
        ("vit_small", 225, "224"),
        ("vit_tiny_patch16_224", 100, "96"),
        ("vit_tiny_patch16_224", 8, "16"),
        ("xcit_nano_12_p16_224", 100, "100×100"),
        ("resnet18", 4, "from 8 to 4096"),
        ("resnet18", True, "whole number"),
    ],
)
def test_image_sizes_that_do_not_fit_are_refused(name, image_size, message):
    with pytest.raises(UserError, match=message):
        resolve_encoder(name, image_size=image_size)


def test_the_number_of_heads_changes_the_features_but_not_the_shapes():
    torch.manual_seed(0)
    six, six_heads, _ = features("vit_small", 32)
    twelve, twelve_heads, _ = features("vit_small", 32, heads=12)
    assert (six.heads, twelve.heads) == (6, 12)
    assert (head_count(six_heads), head_count(twelve_heads)) == (6, 12)
    twelve_heads.load_state_dict(six_heads.state_dict(), strict=True)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert (six_heads(images) - twelve_heads(images)).abs().max() > 1e-4


def test_vit_options_are_refused_where_they_do_not_fit():
    with pytest.raises(UserError, match="192 channels"):
        resolve_encoder("vit_tiny", image_size=32, heads=5)
    for option in ({"heads": 4}, {"sincos": True}, {"freeze_patch_embed": True}):
        with pytest.raises(UserError, match="resnet18 is not one"):
            resolve_encoder("resnet18", image_size=32, **option)


def test_sincos_positions_follow_the_formula():
    width, grid = 16, 5
    positions = sincos_positions(width, grid)
    for row in range(grid):
        for column in range(grid):
            expected = []
            for coordinate in (column, row):
                angles = [coordinate / 10000 ** (k / (width // 4)) for k in range(width // 4)]
                expected += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
            torch.testing.assert_close(positions[row * grid + column], torch.tensor(expected), rtol=1e-6, atol=1e-7)


def test_sincos_and_frozen_patches_stay_fixed_in_training():
    spec = resolve_encoder("vit_tiny", image_size=32, sincos=True, freeze_patch_embed=True)
    encoder = build_encoder(spec)
    assert torch.equal(encoder.pos_embed[0, 0], torch.zeros(192))
    assert torch.equal(encoder.pos_embed[0, 1:], sincos_positions(192, 8))
    frozen = [name for name, p in encoder.named_parameters() if not p.requires_grad]
    assert frozen == ["pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"]
    assert all(p.requires_grad for p in build_encoder(resolve_encoder("vit_tiny", image_size=32)).parameters())


def test_vits_with_frozen_patches_are_initialized_xavier_uniform():
    torch.manual_seed(0)
    encoder = build_encoder(resolve_encoder("vit_tiny", image_size=32, freeze_patch_embed=True))
    bounds = {
        "patch_embed.proj.weight": math.sqrt(6 / (3 * 4 * 4 + 192)),
        "blocks.0.attn.qkv.weight": math.sqrt(6 / (192 + 192)),  # query, key and value are separate matrices
        "blocks.3.mlp.fc1.weight": math.sqrt(6 / (192 + 768)),
    }
    weights = dict(encoder.named_parameters())
    for name, bound in bounds.items():
        assert 0.98 * bound < weights[name].abs().max() <= bound
        assert float(weights[name].detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert not weights["patch_embed.proj.bias"].any()


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("resnet5", "resnet50"),
        ("resnet-50", "resnet50"),
        ("vit_smal", "vit_small"),
        ("convnext_tinny", "convnext_tiny"),
    ],
)
def test_the_error_for_an_unknown_name_suggests_a_similar_one(name, near):
    with pytest.raises(UserError, match=rf"did you mean '{near}'"):
        resolve_encoder(name, image_size=32)


@pytest.mark.parametrize("name", ["hf-hub:timm/resnet18", "local-dir:/etc", "", 5, ["resnet18"], None])
def test_invalid_names_are_refused(name):
    with pytest.raises(UserError):
        resolve_encoder(name, image_size=32)


def test_a_pretrained_tag_is_refused_with_the_plain_name():
    with pytest.raises(UserError, match="use 'resnet26'"):
        resolve_encoder("resnet26.bt_in1k", image_size=32)


def test_encoder_names_are_listed_and_filtered():
    names = list_encoders()
    assert names == sorted(set(names))
    assert {"resnet50", "vit_small", "resnet10-tiny", "convnext_tiny", "wide_resnet50_2"} <= set(names)
    assert "resnet10-narrow" in list_encoders("narrow")
    assert list_encoders("vit_smal?") == ["vit_small"]
    assert list_encoders("no such thing") == []


@pytest.mark.parametrize("name", ["resnet18", "resnet10-narrow", "vit_tiny"])
def test_a_spec_round_trips_through_json(name):
    spec = resolve_encoder(name, image_size=32)
    assert EncoderSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize(
    "change",
    [
        {"library": "os"},
        {"architecture": "hf-hub:someone/model"},
        {"architecture": ["resnet18"]},
        {"model_args": {"checkpoint_path": "weights.pt"}},
        {"model_args": {"pretrained": True}},
        {"model_args": {"layers": [1, 1, 1, 10**9]}},
        {"model_args": {"img_size": "32"}},
        {"model_args": []},
        {"stem": "huge"},
        {"image_size": -1},
        {"image_size": 10**12},
        {"num_features": True},
        {"heads": "six"},
        {"sincos": "yes"},
        {"surprise": 1},
    ],
)
def test_invalid_specs_are_refused(change):
    good = resolve_encoder("resnet10-tiny", image_size=32).to_dict()
    with pytest.raises(UserError):
        EncoderSpec.from_dict(good | change)


@pytest.mark.parametrize("data", [None, [], "resnet18", {}, {"name": "resnet18"}])
def test_other_json_is_refused(data):
    with pytest.raises(UserError, match="not a saved encoder"):
        EncoderSpec.from_dict(data)
