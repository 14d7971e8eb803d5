"""Weights of other libraries: all tensors of the encoder are loaded or the file is refused, and no code is run."""

import os
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from snclr.checkpoint.encoder_file import load_encoder, save_encoder
from snclr.checkpoint.external_weights import read_weights
from snclr.cli.main import main
from snclr.errors import UserError
from snclr.models.encoders import build_encoder, resolve_encoder
from snclr.train.build import initialize_encoders

RESNET = resolve_encoder("resnet18", image_size=96)
TINY = resolve_encoder("resnet10-tiny", image_size=32)
VIT = resolve_encoder("vit_tiny", image_size=32, heads=6)


def weights(spec, seed=0):
    torch.manual_seed(seed)
    return build_encoder(spec).state_dict()


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_torchvision_file_is_loaded_without_its_classifier(tmp_path):
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18()
    path = tmp_path / "resnet18.pth"
    torch.save(model.state_dict(), path)
    found = read_weights(path, RESNET)
    expected = {key: value for key, value in model.state_dict().items() if not key.startswith("fc.")}
    assert same(expected, found.state)
    assert "all 120 tensors" in found.report
    assert "ignored: fc (2)" in found.report
    assert found.warnings == ()


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_timm_vit_warns_that_the_number_of_heads_is_unknown(tmp_path, suffix):
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=VIT.model_args["patch_size"])
    path = tmp_path / f"vit.{suffix}"
    save = save_file if suffix == "safetensors" else torch.save
    save(model.state_dict(), path)
    found = read_weights(path, VIT)
    assert same({key: value for key, value in model.state_dict().items() if not key.startswith("head.")}, found.state)
    assert len(found.warnings) == 1
    assert "attention heads" in found.warnings[0]
    assert "6 are used" in found.warnings[0]


@pytest.mark.parametrize("spec", [RESNET, VIT], ids=lambda spec: spec.name)
def test_the_base_encoder_of_a_moco_v3_checkpoint_is_loaded(tmp_path, spec):
    base, momentum = weights(spec, 1), weights(spec, 2)
    head = "fc" if spec is RESNET else "head"
    state = {f"module.base_encoder.{key}": value for key, value in base.items()}
    state |= {f"module.base_encoder.{head}.{i}.weight": torch.ones(4, 4) for i in (0, 3)}
    state |= {f"module.momentum_encoder.{key}": value for key, value in momentum.items()}
    state |= {f"module.predictor.{i}.weight": torch.ones(4, 4) for i in (0, 3)}
    path = tmp_path / "checkpoint_0299.pth.tar"
    optimizer = {"state": {0: {"step": 3, "exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"epoch": 300, "arch": "vit_small", "state_dict": state, "optimizer": optimizer, "scaler": {}}, path)
    loaded = read_weights(path, spec)
    assert same(base, loaded.state)
    for part in ("under module.base_encoder", f"base_encoder.{head} (2)", "momentum_encoder (", "predictor (2)"):
        assert part in loaded.report
    assert len(loaded.warnings) == (1 if spec is VIT else 0)


PREFIXES = ["", "module.", "encoder.", "base_encoder.", "backbone.", "model.", "module.model.backbone.", "_orig_mod."]


@pytest.mark.parametrize("container", [None, "state_dict", "model"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_known_prefixes_and_containers_are_found(tmp_path, prefix, container):
    state = weights(TINY)
    content = {prefix + key: value for key, value in state.items()}
    torch.save(content if container is None else {container: content}, tmp_path / "w.pt")
    assert same(state, read_weights(tmp_path / "w.pt", TINY).state)


def test_the_more_complete_of_two_encoders_is_loaded(tmp_path):
    state = weights(TINY)
    part = dict(list(weights(TINY, 5).items())[:4])
    content = {f"backbone.{key}": value for key, value in part.items()}
    content |= {f"model.encoder.{key}": value for key, value in state.items()}
    torch.save(content, tmp_path / "w.pt")
    found = read_weights(tmp_path / "w.pt", TINY)
    assert same(state, found.state)
    assert "backbone.conv1 (" in found.report


def test_half_precision_becomes_float32_and_batch_counts_may_be_missing(tmp_path):
    state = weights(TINY)
    old = {key: value.half() for key, value in state.items() if not key.endswith("num_batches_tracked")}
    torch.save(old, tmp_path / "w.pt")
    found = read_weights(tmp_path / "w.pt", TINY).state
    assert found.keys() == state.keys()
    assert all(found[key].dtype == state[key].dtype for key in state)
    assert torch.equal(found["layer4.0.conv1.weight"], old["layer4.0.conv1.weight"].float())


def test_a_deeper_network_is_refused(tmp_path):
    """A ResNet-34 contains every tensor of a ResNet-18 with the same shape."""
    torch.save(weights(resolve_encoder("resnet34", image_size=96)), tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"do not fit resnet18: additional tensors \(\d+\): layer1\.2\.conv1"):
        read_weights(tmp_path / "w.pth", RESNET)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s.pop("layer4.0.conv1.weight"),
            r"missing tensors \(1 of \d+\): layer4\.0\.conv1\.weight",
        ),
        (lambda s: s.update({"layer9.weight": torch.ones(1)}), r"additional tensors \(1\): layer9\.weight"),
        (lambda s: s.update({"bn1.bias": torch.ones(3)}), r"bn1\.bias \(3,\) instead of"),
        (lambda s: s.update({"bn1.bias": s["bn1.bias"] * float("nan")}), r"bn1\.bias has values that are not finite"),
        (lambda s: s.update({"bn1.bias": s["bn1.bias"].int()}), r"bn1\.bias is torch\.int32"),
        (lambda s: s.update({"bn1.bias": s["bn1.bias"].to_sparse()}), r"bn1\.bias is .*sparse"),
        (lambda s: [s.pop(key) for key in list(s) if key != "bn1.bias"], r"missing tensors \(\d+ of \d+\): conv1"),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_the_key(tmp_path, change, message):
    state = weights(TINY)
    change(state)
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(UserError, match=message):
        read_weights(tmp_path / "w.pt", TINY)


def test_errors_for_other_architectures_and_sizes_give_advice(tmp_path):
    torch.save(weights(VIT), tmp_path / "vit.pt")
    with pytest.raises(UserError, match=r"no weights of resnet18.*cls_token"):
        read_weights(tmp_path / "vit.pt", RESNET)
    with pytest.raises(UserError, match="another image size"):
        read_weights(tmp_path / "vit.pt", resolve_encoder("vit_tiny", image_size=64, heads=6))
    torch.save(weights(RESNET), tmp_path / "resnet.pt")
    with pytest.raises(UserError, match="--stem standard"):
        read_weights(tmp_path / "resnet.pt", resolve_encoder("resnet18", image_size=32))


class Payload:
    """A pickle that creates a folder when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def _write_pickle(content, path):
    path.write_bytes(pickle.dumps(content))


def _write_zip(content, path):
    torch.save(content, path)


def _write_legacy(content, path):
    torch.save(content, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("write", [_write_pickle, _write_zip, _write_legacy])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("suffix", ["pth", "pt", "safetensors", "pkl"])
def test_code_in_a_file_is_never_run(tmp_path, write, nested, suffix):
    mark, path = tmp_path / "mark", tmp_path / f"w.{suffix}"
    payload = Payload(mark)
    write({**weights(TINY), "args": payload} if nested else payload, path)
    message = "cannot read" if suffix == "safetensors" else r"is refused: .*loading it can run code"
    with pytest.raises(UserError, match=message):
        read_weights(path, TINY)
    assert not mark.exists()
    if write is _write_zip and suffix != "safetensors":
        torch.load(path, weights_only=False)  # an unsafe load runs the code
        assert mark.exists()


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04", b"\x80\x02.", b"\x00" * 100])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_damaged_files_are_refused(tmp_path, content, suffix):
    path = tmp_path / f"w.{suffix}"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"w\."):
        read_weights(path, TINY)


def test_a_text_file_is_not_weights(tmp_path):
    (tmp_path / "notes.txt").write_text("holiday 2021")
    with pytest.raises(UserError, match=r"notes.txt as a file of torch.save: it is none, .*\. Give a file of weights"):
        read_weights(tmp_path / "notes.txt", RESNET)


@pytest.mark.parametrize("content", [[1, 2], {"state_dict": 3}, {"epoch": 1}, {"state_dict": {"a": 1}}, torch.ones(2)])
def test_files_without_a_state_dict_are_refused(tmp_path, content):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(UserError, match="no named tensors"):
        read_weights(tmp_path / "w.pt", TINY)


def test_a_path_that_is_neither_a_file_nor_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"there is no .*nowhere"):
        read_weights(tmp_path / "nowhere", TINY)
    with pytest.raises(UserError, match=r"no config\.json"):
        read_weights(tmp_path, TINY)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=8), st.sampled_from(["pt", "safetensors"]))
def test_a_damaged_file_is_loaded_or_refused_without_other_errors(tmp_path, offset, junk, suffix):
    path = tmp_path / f"w.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)({"bn1.bias": torch.ones(8)}, path)
    content = bytearray(path.read_bytes())
    offset %= len(content)
    content[offset : offset + len(junk)] = junk
    path.write_bytes(content)
    with pytest.raises(UserError):  # one tensor of many is never enough, damaged or not
        read_weights(path, TINY)


def test_a_run_directory_and_its_weights_file(tmp_path):
    torch.manual_seed(0)
    encoder = build_encoder(VIT)
    save_encoder(encoder, VIT, tmp_path)
    for path in (tmp_path, tmp_path / "encoder.safetensors"):
        found = read_weights(path, VIT)
        assert same(encoder.state_dict(), found.state)
        assert found.warnings == (), "a run records its number of heads"
        other = resolve_encoder("vit_tiny", image_size=32, heads=3)
        with pytest.raises(UserError, match="6 attention heads instead of 3"):
            read_weights(path, other)
        with pytest.raises(UserError, match="6 attention heads instead of None"):
            read_weights(path, TINY)


def test_the_encoder_and_the_target_network_both_get_the_weights(tmp_path):
    state = weights(VIT, 7)
    torch.save({f"module.base_encoder.{key}": value for key, value in state.items()}, tmp_path / "w.pth.tar")
    encoder, momentum = build_encoder(VIT), build_encoder(VIT)
    loaded, warning = initialize_encoders([encoder, momentum], VIT, str(tmp_path / "w.pth.tar"))
    assert same(state, encoder.state_dict())
    assert same(state, momentum.state_dict())
    assert "under module.base_encoder" in loaded
    assert warning.startswith("warning: ")
    assert "attention heads" in warning
    with torch.no_grad():
        encoder.cls_token.add_(1)
    assert not torch.equal(encoder.cls_token, momentum.cls_token), "the copies must not share memory"


def test_pretrained_reads_torchvisions_weights_from_its_cache(tmp_path, monkeypatch):
    import torchvision

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    name = torchvision.models.ResNet18_Weights.DEFAULT.url.rsplit("/", 1)[1]
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    model = torchvision.models.resnet18()
    torch.save(model.state_dict(), tmp_path / "hub/checkpoints" / name)
    found = read_weights("pretrained", RESNET)
    assert same({key: value for key, value in model.state_dict().items() if not key.startswith("fc.")}, found.state)
    assert found.warnings == ()
    with pytest.raises(UserError, match="there is no pretrained"):
        read_weights("./pretrained", RESNET)


def test_pretrained_weights_of_timm_with_another_normalization_warn(tmp_path, monkeypatch):
    import timm

    spec = resolve_encoder("vit_tiny_patch16_224", image_size=32)
    create = timm.create_model
    model = create("vit_tiny_patch16_224", img_size=32, **{k: v for k, v in spec.model_args.items() if k != "img_size"})
    save_file(model.state_dict(), tmp_path / "vit.safetensors")
    overlay = {"file": str(tmp_path / "vit.safetensors"), "hf_hub_id": None}
    monkeypatch.setattr(
        timm, "create_model", lambda *args, **kwargs: create(*args, **kwargs, pretrained_cfg_overlay=overlay)
    )
    found = read_weights("pretrained", spec)
    assert same({key: value for key, value in model.state_dict().items() if not key.startswith("head.")}, found.state)
    assert ["mean (0.5, 0.5, 0.5)" in text for text in found.warnings] == [True]
    with pytest.raises(UserError, match=r"have 3 attention heads, not 6"):
        read_weights("pretrained", resolve_encoder("vit_tiny_patch16_224", image_size=32, heads=6))


def test_pretrained_without_a_network_or_without_weights_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.download_url_to_file", lambda *a, **k: (_ for _ in ()).throw(OSError("no network")))
    with pytest.raises(UserError, match=r"from torchvision \(no network\). Download them"):
        read_weights("pretrained", RESNET)
    with pytest.raises(UserError, match="no pretrained weights of resnet10-tiny"):
        read_weights("pretrained", TINY)
    with pytest.raises(UserError, match="no pretrained weights of vit4-tiny"):
        read_weights("pretrained", resolve_encoder("vit4-tiny", image_size=32))


def test_import_writes_a_folder_that_evaluations_take(tmp_path, capsys):
    import torchvision

    model = torchvision.models.resnet18().eval()
    torch.save(model.state_dict(), tmp_path / "resnet18.pth")
    arguments = ["import", str(tmp_path / "resnet18.pth"), "--encoder", "resnet18", "--image-size", "32"]
    arguments += ["--stem", "standard", "--out", str(tmp_path / "imported")]
    assert main(arguments) == 0
    assert "ignored: fc (2)" in capsys.readouterr().out
    encoder, _ = load_encoder(tmp_path / "imported")
    model.fc = torch.nn.Identity()
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(encoder(images), model(images), rtol=0, atol=0)
    for label in ("ants", "bees"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(10):
            pixels = (torch.rand(32, 32, 3) * 255).byte().numpy()
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"{number}.png")
    assert (
        main(["knn", str(tmp_path / "imported"), "--data", str(tmp_path / "photos"), "--no-baselines", "--k", "3"]) == 0
    )
    assert main(arguments) == 2
    assert "not an empty folder" in capsys.readouterr().err
