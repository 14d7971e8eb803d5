"""Exports: each format loads in its library, and an export that fails its check is deleted."""

import itertools
import json
import os
import pickle
import pickletools
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import snclr
from snclr.checkpoint.encoder_file import load_encoder, save_encoder
from snclr.cli.main import main
from snclr.errors import UserError
from snclr.exporters import to_folder, to_onnx, to_resnets
from snclr.exporters.export import FORMATS, check_supported
from snclr.exporters.format import ExportError
from snclr.exporters.to_resnets import detectron2_key, resnet_layout
from snclr.models.encoders import build_encoder, resolve_encoder, state_on_meta
from snclr.models.names import TORCHVISION_RESNETS
from tests.helpers.photos import as_evaluated, write_photos


def make_run(folder, name, **options):
    """Write a run whose weights and running statistics are not the initial ones, so that swapped tensors are seen."""
    spec = resolve_encoder(name, **options)
    torch.manual_seed(0)
    encoder = build_encoder(spec)
    encoder.train()(torch.randn(4, 3, spec.image_size, spec.image_size))
    with torch.no_grad():
        for p in encoder.parameters():
            p.add_(0.02 * torch.randn_like(p))
    save_encoder(encoder, spec, folder, extra={"epochs": 3})
    return folder, encoder.eval(), spec


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("resnet"), "resnet18", image_size=32, stem="standard")


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("vit"), "vit_small", image_size=32, heads=12)


@pytest.fixture(scope="module")
def exports(resnet, vit, tmp_path_factory):
    """A ResNet in every format, and small ViTs in those that take one."""
    small = make_run(tmp_path_factory.mktemp("small-vit"), "test_vit", image_size=32, heads=4)
    made = {"resnet": (*resnet, snclr.export(resnet[0], to=list(FORMATS)))}
    made["vit"] = (*vit, snclr.export(vit[0], to="timm"))
    made["small-vit"] = (*small, snclr.export(small[0], ["onnx"], out=small[0] / "elsewhere"))
    return made


def find(exports, case, name):
    return next(item for item in exports[case][3] if item.format == name)


def test_each_format_is_written_to_its_own_folder(exports):
    folder = exports["resnet"][0] / "export"
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {
        "torchvision/encoder.pth",
        "timm/config.json",
        "timm/model.safetensors",
        "detectron2/encoder.pkl",
        "mmdet/encoder.pth",
        "onnx/encoder.onnx",
        "safetensors/config.json",
        "safetensors/encoder.safetensors",
    }
    assert find(exports, "small-vit", "onnx").path == exports["small-vit"][0] / "elsewhere" / "onnx" / "encoder.onnx"
    for _, _, _, done in exports.values():
        for item in done:
            assert item.path.exists()
            assert item.difference <= (1e-4 if item.format == "onnx" else 1e-5)


def test_the_snippets_run_without_snclr(exports, tmp_path):
    """Run the snippets of all installed libraries in one process."""
    lines = ["import sys", "import numpy", "import torch", "torch.set_num_threads(1)", "results = {}"]
    write_photos(tmp_path)
    for case, (_, encoder, spec, done) in exports.items():
        images = torch.randn(2, 3, spec.image_size, spec.image_size)
        torch.save(images, tmp_path / f"{case}.pt")
        with torch.no_grad():
            torch.save(encoder(images), tmp_path / f"{case}-features.pt")
            torch.save(as_evaluated(encoder, spec, tmp_path / "wide.png"), tmp_path / f"{case}-photo.pt")
        for item in done:
            if item.format in ("detectron2", "mmdet"):
                continue
            lines += [item.snippet, f"images = torch.load({str(tmp_path / f'{case}.pt')!r}, weights_only=True)"]
            call = "torch.from_numpy(encoder(images.numpy()))" if item.format == "onnx" else "encoder(images).detach()"
            lines.append(f"results['{case} {item.format}'] = {call}")
            photo = f"encoder(preprocess(Image.open({str(tmp_path / 'wide.png')!r})))"
            lines.append(f"results['{case} {item.format} photo'] = torch.as_tensor({photo}).detach()")
    lines.append("assert not any(name.split('.')[0] == 'snclr' for name in sys.modules)")
    lines.append(f"torch.save(results, {str(tmp_path / 'out.pt')!r})")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, cwd=tmp_path, timeout=280, env=environment)
    results = torch.load(tmp_path / "out.pt", weights_only=True)
    assert len(results) == 12
    for key, result in results.items():
        file = f"{key.split()[0]}-{'photo' if key.endswith('photo') else 'features'}.pt"
        features = torch.load(tmp_path / file, weights_only=True)
        torch.testing.assert_close(result, features, rtol=1e-4, atol=1e-4, msg=key)


def test_the_detectron2_snippet_sets_what_these_weights_need(exports, monkeypatch):
    """Run with mock modules, since detectron2 is not installed."""

    class Settings(types.SimpleNamespace):
        def __getattr__(self, name):
            self.__dict__[name] = Settings()
            return self.__dict__[name]

        def merge_from_file(self, path):
            self.base = path

    model_zoo = types.ModuleType("detectron2.model_zoo")
    model_zoo.get_config_file = lambda path: path
    config = types.ModuleType("detectron2.config")
    config.get_cfg = Settings
    package = types.ModuleType("detectron2")
    package.model_zoo = model_zoo
    for module in (package, model_zoo, config):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    names = {}
    item = find(exports, "resnet", "detectron2")
    exec(item.snippet, names)
    cfg = names["cfg"]
    assert Path(cfg.MODEL.WEIGHTS) == item.path
    assert cfg.INPUT.FORMAT == "RGB"
    assert np.allclose(cfg.MODEL.PIXEL_MEAN, [123.675, 116.28, 103.53])
    assert np.allclose(cfg.MODEL.PIXEL_STD, [58.395, 57.12, 57.375])
    assert (cfg.MODEL.RESNETS.DEPTH, cfg.MODEL.RESNETS.RES2_OUT_CHANNELS) == (18, 64)
    assert (cfg.MODEL.RESNETS.NUM_GROUPS, cfg.MODEL.RESNETS.WIDTH_PER_GROUP) == (1, 64)
    assert cfg.MODEL.RESNETS.STRIDE_IN_1X1 is False
    assert cfg.MODEL.RESNETS.NORM == "SyncBN"


def test_the_mmdet_snippet_is_a_config_with_the_path_of_the_file(exports):
    names = {}
    item = find(exports, "resnet", "mmdet")
    exec(item.snippet, names)
    backbone = names["model"]["backbone"]
    assert (backbone["type"], backbone["depth"], backbone["style"]) == ("ResNet", 18, "pytorch")
    assert backbone["norm_cfg"]["type"] == "SyncBN"
    assert backbone["init_cfg"]["type"] == "Pretrained"
    checkpoint = torch.load(backbone["init_cfg"]["checkpoint"], weights_only=True)
    state = exports["resnet"][1].state_dict()
    assert checkpoint["state_dict"].keys() == state.keys()
    assert all(torch.equal(checkpoint["state_dict"][key], state[key]) for key in state)
    assert names["model"]["data_preprocessor"]["bgr_to_rgb"] is True


def expected_shapes(depth, groups, width):
    """Return detectron2's names and the shapes of the convolutions, derived from the architecture rule."""
    blocks = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
    shapes, channels = {"stem.conv1": (64, 3, 7, 7)}, 64
    for stage, count in enumerate(blocks[depth]):
        planes = 64 * 2**stage
        inner = planes * width // 64 * groups
        out = 4 * planes if depth >= 50 else planes
        for block in range(count):
            name = f"res{stage + 2}.{block}"
            if depth >= 50:
                shapes[f"{name}.conv1"] = (inner, channels, 1, 1)
                shapes[f"{name}.conv2"] = (inner, inner // groups, 3, 3)
                shapes[f"{name}.conv3"] = (out, inner, 1, 1)
            else:
                shapes |= {f"{name}.conv1": (out, channels, 3, 3), f"{name}.conv2": (out, out, 3, 3)}
            if channels != out:
                shapes[f"{name}.shortcut"] = (out, channels, 1, 1)
            channels = out
    table = {f"{name}.weight": shape for name, shape in shapes.items()}
    for name, shape in shapes.items():
        for part in ("weight", "bias", "running_mean", "running_var"):
            table[f"{name}.norm.{part}"] = (shape[0],)
        table[f"{name}.norm.num_batches_tracked"] = ()
    return table


def detectron2_shapes(architecture):
    spec = resolve_encoder(architecture, image_size=96)
    return {detectron2_key(key): tuple(value.shape) for key, value in state_on_meta(spec).items()}


@pytest.mark.parametrize("architecture", TORCHVISION_RESNETS)
def test_detectron2_names_and_shapes_follow_the_architecture(architecture):
    assert detectron2_shapes(architecture) == expected_shapes(*resnet_layout(architecture))


def detectron2_features(weights, images):
    """Compute the pooled res5 of detectron2's ResNet with STRIDE_IN_1X1 False: images (N, 3, S, S) to (N, D).

    It uses detectron2's names only, so a tensor under the wrong name changes the features.
    """

    def layer(x, name, stride=1):
        kernel = weights[f"{name}.weight"]
        groups = x.shape[1] // kernel.shape[1]
        x = F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2, groups=groups)
        return F.batch_norm(
            x, *(weights[f"{name}.norm.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        )

    x = F.max_pool2d(F.relu(layer(images, "stem.conv1", 2)), 3, 2, 1)
    for stage in (2, 3, 4, 5):
        for block in itertools.count():
            name = f"res{stage}.{block}"
            if f"{name}.conv1.weight" not in weights:
                break
            stride = 2 if stage > 2 and block == 0 else 1
            shortcut = layer(x, f"{name}.shortcut", stride) if f"{name}.shortcut.weight" in weights else x
            if f"{name}.conv3.weight" in weights:
                y = F.relu(layer(F.relu(layer(x, f"{name}.conv1")), f"{name}.conv2", stride))
                x = F.relu(layer(y, f"{name}.conv3") + shortcut)
            else:
                x = F.relu(layer(F.relu(layer(x, f"{name}.conv1", stride)), f"{name}.conv2") + shortcut)
    return x.mean(dim=(2, 3))


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["resnet18", "resnet50", "resnext50_32x4d"])
def test_detectron2_names_give_the_features_of_the_encoder(architecture, tmp_path):
    folder, encoder, spec = make_run(tmp_path, architecture, image_size=32, stem="standard")
    (item,) = snclr.export(folder, "detectron2")
    with item.path.open("rb") as file:
        weights = {key: torch.from_numpy(value) for key, value in pickle.load(file)["model"].items()}
    images = torch.randn(2, 3, spec.image_size, spec.image_size)
    torch.testing.assert_close(detectron2_features(weights, images), encoder(images), rtol=1e-4, atol=1e-4)


def test_a_detectron2_file_opens_with_any_numpy_version(exports):
    item = find(exports, "resnet", "detectron2")
    content = item.path.read_bytes()
    with item.path.open("rb") as file:
        data = pickle.load(file, encoding="latin1")
    assert data.keys() == {"model", "__author__", "matching_heuristics"}
    assert data["matching_heuristics"] is True
    state = {detectron2_key(key): value for key, value in exports["resnet"][1].state_dict().items()}
    assert data["model"].keys() == state.keys()
    for key, value in data["model"].items():
        assert type(value) is np.ndarray
        assert value.flags.writeable
        assert np.array_equal(value, state[key].numpy())
    strings = [argument for code, argument, _ in pickletools.genops(content) if "UNICODE" in code.name]
    assert [text for text in strings if text.split(".")[0] in ("numpy", "builtins", "torch", "snclr")] == [
        "numpy",
        "snclr",
    ]
    names = [code.name for code, _, _ in pickletools.genops(content) if code.name in ("GLOBAL", "STACK_GLOBAL")]
    assert names == ["STACK_GLOBAL"], "numpy.ndarray and no other name"


def test_onnx_takes_any_batch_size_and_describes_the_encoder(exports):
    onnx = pytest.importorskip("onnx")
    for case in ("resnet", "small-vit"):
        model = onnx.load(str(find(exports, case, "onnx").path))
        batch, *rest = model.graph.input[0].type.tensor_type.shape.dim
        assert batch.dim_param
        assert [d.dim_value for d in rest] == [3, 32, 32]
        assert {entry.domain: entry.version for entry in model.opset_import}[""] == to_onnx.OPSET
        description = json.loads({entry.key: entry.value for entry in model.metadata_props}["snclr"])
        assert description["mean"] == [0.485, 0.456, 0.406]
        assert description["encoder"] == exports[case][2].to_dict()


def test_timm_can_add_a_classifier_or_change_the_channels(exports):
    import timm

    for case in ("resnet", "vit"):
        address = f"local-dir:{find(exports, case, 'timm').path}"
        model = timm.create_model(address, pretrained=True, num_classes=10)
        state = exports[case][1].state_dict()
        assert all(torch.equal(model.state_dict()[key], state[key]) for key in state)
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
        assert timm.create_model(address, pretrained=True, in_chans=1)(torch.zeros(2, 1, 32, 32)).ndim == 2


def test_a_safetensors_export_loads_like_a_run(exports):
    folder, _, spec, _ = exports["resnet"]
    copied = find(exports, "resnet", "safetensors").path
    assert load_encoder(copied)[1] == spec
    assert (copied / "config.json").read_text() == (folder / "config.json").read_text()
    ours, theirs = (load_file(path / "encoder.safetensors") for path in (folder, copied))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@torch.no_grad()
def test_the_timm_config_has_the_number_of_heads(exports):
    import timm

    _, encoder, spec, _ = exports["vit"]
    folder = find(exports, "vit", "timm").path
    assert json.loads((folder / "config.json").read_text())["model_args"]["num_heads"] == 12
    assert timm.create_model(f"local-dir:{folder}", pretrained=True).blocks[0].attn.num_heads == 12
    wrong = timm.create_model(spec.architecture, num_classes=0, img_size=32, patch_size=spec.model_args["patch_size"])
    assert wrong.blocks[0].attn.num_heads == 6
    wrong.load_state_dict(
        load_file(folder / "model.safetensors"), strict=True
    )  # shapes do not depend on the number of heads
    images = torch.randn(2, 3, 32, 32)
    assert (wrong.eval()(images) - encoder(images)).abs().max() > 1e-2


def alter_heads(path, heads):
    config = json.loads(path.read_text())
    config["snclr"]["encoder"]["heads"] = config["snclr"]["encoder"]["model_args"]["num_heads"] = heads
    config["model_args"]["num_heads"] = heads
    path.write_text(json.dumps(config))


def test_an_edited_number_of_heads_is_refused(vit, tmp_path):
    save_encoder(vit[1], vit[2], tmp_path)
    alter_heads(tmp_path / "config.json", 6)
    with pytest.raises(UserError, match="different encoders"):
        load_encoder(tmp_path)
    with pytest.raises(UserError, match="different encoders"):
        snclr.export(tmp_path, "timm")


def test_a_timm_config_without_the_number_of_heads_fails_the_check(vit, tmp_path, monkeypatch):
    def without_heads(encoder, spec, folder, *, extra):
        save_encoder(encoder, spec, folder, extra=extra)
        config = json.loads((folder / "config.json").read_text())
        del config["model_args"]["num_heads"]
        (folder / "config.json").write_text(json.dumps(config))

    monkeypatch.setattr(to_folder.encoder_file, "save_encoder", without_heads)
    with pytest.raises(UserError, match=r"timm: the export was deleted, its features differ"):
        snclr.export(vit[0], "timm", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_swapped_tensors_of_equal_shape_fail_the_check(resnet, tmp_path, monkeypatch):
    def swapped(key):
        swaps = {"layer1.0.bn1": "layer1.0.bn2", "layer1.0.bn2": "layer1.0.bn1"}
        prefix, _, part = key.rpartition(".")
        return detectron2_key(f"{swaps.get(prefix, prefix)}.{part}")

    monkeypatch.setattr(to_resnets, "detectron2_key", swapped)
    with pytest.raises(UserError, match=r"detectron2: .*features differ"):
        snclr.export(resnet[0], "detectron2", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_missing_tensor_is_named_and_nothing_is_left(resnet, tmp_path, monkeypatch):
    class Incomplete(torch.nn.Module):
        def state_dict(self):
            return {key: value for key, value in resnet[1].state_dict().items() if "layer4.1.conv2" not in key}

    write = FORMATS["detectron2"].write
    monkeypatch.setattr(FORMATS["detectron2"], "write", lambda encoder, *rest: write(Incomplete(), *rest))
    with pytest.raises(UserError, match=r"could not be loaded \(missing keys \['layer4\.1\.conv2\.weight'\]"):
        snclr.export(resnet[0], "detectron2", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_nan_features_fail_the_check(tmp_path):
    folder, encoder, spec = make_run(tmp_path / "run", "resnet10-tiny", image_size=32)
    with torch.no_grad():
        encoder.bn1.weight.fill_(float("nan"))
    save_encoder(encoder, spec, folder)
    with pytest.raises(UserError, match="features differ"):
        snclr.export(folder, "safetensors")
    assert list((folder / "export").iterdir()) == []


def test_a_failed_write_keeps_the_earlier_export(resnet, tmp_path, monkeypatch):
    snclr.export(resnet[0], "torchvision", tmp_path)
    before = (tmp_path / "torchvision" / "encoder.pth").read_bytes()

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.save", no_space)
    with pytest.raises(UserError, match=r"torchvision: could not write to .*No space left"):
        snclr.export(resnet[0], "torchvision", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["torchvision"]
    assert (tmp_path / "torchvision" / "encoder.pth").read_bytes() == before


def test_an_export_replaces_an_earlier_one_but_no_other_files(resnet, tmp_path):
    old = tmp_path / "torchvision" / "encoder.pth"
    old.parent.mkdir()
    old.write_bytes(b"an earlier export")
    snclr.export(resnet[0], "torchvision", tmp_path)
    assert len(old.read_bytes()) > 1_000_000
    (old.parent / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not an earlier export"):
        snclr.export(resnet[0], "torchvision", tmp_path)
    assert (old.parent / "notes.txt").read_text() == "mine"
    (tmp_path / "mmdet").write_text("a file")
    with pytest.raises(UserError, match="is not an earlier export"):
        snclr.export(resnet[0], "mmdet", tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "to", "parts"),
    [
        ("resnet18", {"image_size": 32}, "torchvision", ["low-resolution stem 'small'", "formats: onnx, safetensors"]),
        ("resnet18", {"image_size": 32}, "timm", ["low-resolution stem 'small'", "formats: onnx, safetensors"]),
        ("resnet10-tiny", {"image_size": 96}, "detectron2", ["not one of torchvision's", "formats: timm, onnx"]),
        ("vit_tiny", {"image_size": 32}, "mmdet", ["not one of torchvision's", "formats: timm, onnx, safetensors"]),
        ("wide_resnet50_2", {"image_size": 96}, "mmdet", ["wide", "formats: torchvision, timm, detectron2"]),
        ("swin_tiny_patch4_window7_224", {"image_size": 224}, "timm", ["older layout", "formats: onnx, safetensors"]),
    ],
)
def test_an_unsupported_format_is_refused_with_the_supported_ones(name, options, to, parts):
    spec = resolve_encoder(name, **options)
    with pytest.raises(UserError) as caught:
        check_supported(to, spec)
    for part in parts:
        assert part in str(caught.value)


def test_formats_that_can_be_written_are_written_if_another_fails(tmp_path, capsys):
    folder, _, _ = make_run(tmp_path / "run", "resnet10-tiny", image_size=32)
    with pytest.raises(ExportError, match=r"cannot export to torchvision: .* Written: safetensors\.$") as caught:
        snclr.export(folder, "torchvision,safetensors")
    assert [item.format for item in caught.value.exports] == ["safetensors"]
    assert [path.name for path in (folder / "export").iterdir()] == ["safetensors"]
    command = ["export", str(folder), "--to", "torchvision,safetensors", "--out", str(tmp_path / "out")]
    assert main(command) == 2
    printed = capsys.readouterr()
    assert "safetensors: wrote" in printed.out
    assert printed.err.startswith("snclr export: cannot export to torchvision: ")
    assert main([*command, "--json"]) == 2
    record = json.loads(capsys.readouterr().out)
    assert ([item["format"] for item in record["exports"]], list(record["failed"])) == (
        ["safetensors"], ["torchvision"]
    )  # fmt: skip
    assert main(["export", str(folder), "--to", "torchvision"]) == 2
    assert capsys.readouterr().err.endswith("Nothing was written.\n")


def test_missing_onnx_packages_are_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxruntime" else object())
    with pytest.raises(UserError, match=r"onnxruntime is not installed; pip install 'snclr\[onnx\]'"):
        check_supported("onnx", resolve_encoder("resnet18", image_size=96))


@pytest.mark.parametrize("to", ["tensorflow", "timm,tensorflow", "", [], ","])
def test_an_unknown_format_is_refused_with_the_known_ones(resnet, to):
    with pytest.raises(UserError, match="torchvision, timm, detectron2, mmdet, onnx, safetensors"):
        snclr.export(resnet[0], to)


def test_the_command_line(resnet, tmp_path, capsys):
    run, out = str(resnet[0]), str(tmp_path)
    assert main(["export", run, "--to", "torchvision,mmdet", "--out", out]) == 0
    printed = capsys.readouterr().out
    wrote = f"torchvision: wrote {tmp_path / 'torchvision' / 'encoder.pth'}"
    assert f"{wrote}\n  loaded again, features identical" in printed
    assert "encoder = torchvision.models.resnet18()" in printed
    assert "init_cfg=dict(" in printed
    assert main(["export", run, "--to", "torchvision", "--out", out, "--json"]) == 0
    (item,) = json.loads(capsys.readouterr().out)["exports"]
    assert item["format"] == "torchvision"
    assert item["path"] == str(tmp_path / "torchvision" / "encoder.pth")
    assert item["difference"] <= 1e-5
    assert "load_state_dict" in item["snippet"]
    assert main(["export", run, "--to", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("snclr export: there is no format 'nothing'")


def test_export_stays_a_function_after_importing_its_package():
    code = "import snclr, snclr.exporters.export; assert type(snclr.export) is type(lambda: 0)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=280)
