"""Exports: each format is what its software reads, and nothing that fails its own check is left behind."""

import json
import os
import pickle
import pickletools
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import snclr
from snclr.cli import main
from snclr.encoders import build_encoder, resolve_encoder, state_on_meta
from snclr.errors import UserError
from snclr.export import detectron2_format, formats, onnx_format, timm_format
from snclr.export.encoder import load_encoder, save_encoder
from snclr.export.resnet_layout import LAYOUTS, convolutions, detectron2_names, table, torchvision_names


def make_run(folder, name, **options):
    """A run folder whose weights and running statistics are not the initial ones, so that no mix-up stays unseen."""
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
    made = {"resnet": (*resnet, snclr.export(resnet[0], to=list(formats.FORMATS)))}
    made["vit"] = (*vit, snclr.export(vit[0], to="timm"))
    made["small-vit"] = (*small, snclr.export(small[0], ["onnx"], out=small[0] / "elsewhere"))
    return made


def find(exports, case, name):
    return next(item for item in exports[case][3] if item.format == name)


def test_what_is_written_where(exports):
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


def test_the_printed_lines_work_without_snclr(exports, tmp_path):
    """Each snippet as it is printed, all in one process, where its library is installed."""
    lines = ["import sys", "import numpy", "import torch", "torch.set_num_threads(1)", "results = {}"]
    for case, (_, encoder, spec, done) in exports.items():
        images = torch.randn(2, 3, spec.image_size, spec.image_size)
        torch.save(images, tmp_path / f"{case}.pt")
        with torch.no_grad():
            torch.save(encoder(images), tmp_path / f"{case}-features.pt")
        for item in done:
            if item.format in ("detectron2", "mmdet"):
                continue
            lines += [item.snippet, f"images = torch.load({str(tmp_path / f'{case}.pt')!r}, weights_only=True)"]
            call = "torch.from_numpy(encoder(images.numpy()))" if item.format == "onnx" else "encoder(images).detach()"
            lines.append(f"results['{case} {item.format}'] = {call}")
    lines.append("assert not any(name.split('.')[0] == 'snclr' for name in sys.modules)")
    lines.append(f"torch.save(results, {str(tmp_path / 'out.pt')!r})")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, cwd=tmp_path, timeout=120, env=environment)
    results = torch.load(tmp_path / "out.pt", weights_only=True)
    assert len(results) == 6
    for key, result in results.items():
        features = torch.load(tmp_path / f"{key.split()[0]}-features.pt", weights_only=True)
        torch.testing.assert_close(result, features, rtol=1e-4, atol=1e-4, msg=key)


def test_detectron2_lines_set_what_these_weights_need(exports, monkeypatch):
    """Run with stand-ins: the library is not installed."""

    class Settings(types.SimpleNamespace):
        def __getattr__(self, name):
            self.__dict__[name] = Settings()
            return self.__dict__[name]

        def merge_from_file(self, path):
            self.base = path

    zoo = types.ModuleType("detectron2.model_zoo")
    zoo.get_config_file = lambda path: path
    config = types.ModuleType("detectron2.config")
    config.get_cfg = Settings
    package = types.ModuleType("detectron2")
    package.model_zoo = zoo
    for module in (package, zoo, config):
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
    assert cfg.MODEL.RESNETS.STRIDE_IN_1X1 is False
    assert cfg.MODEL.RESNETS.NORM == "SyncBN"


def test_mmdet_lines_are_a_config_that_names_the_file(exports):
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


def to_detectron2(key):
    """The rule in words: stages start at res2, a norm belongs to its convolution, downsample is the shortcut."""
    key = re.sub(r"^layer(\d)", lambda m: f"res{int(m[1]) + 1}", key)
    key = key if key.startswith("res") else f"stem.{key}"
    key = re.sub(r"\bbn(\d)\b", r"conv\1.norm", key)
    return key.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")


@pytest.mark.parametrize("architecture", LAYOUTS)
def test_tables_of_the_architectures(architecture):
    """The rule gives the tensors that torchvision's classes have, and under detectron2's names too."""
    spec = resolve_encoder(architecture, image_size=96)
    actual = {key: tuple(value.shape) for key, value in state_on_meta(spec).items()}
    assert table(LAYOUTS[architecture], torchvision_names) == actual
    assert table(LAYOUTS[architecture], detectron2_names) == {to_detectron2(key): actual[key] for key in actual}


def test_resnet50_of_detectron2_by_hand():
    shapes = table(LAYOUTS["resnet50"], detectron2_names)
    assert len(shapes) == 53 * 6
    assert shapes["stem.conv1.weight"] == (64, 3, 7, 7)
    assert shapes["stem.conv1.norm.running_var"] == (64,)
    assert shapes["res2.0.shortcut.weight"] == (256, 64, 1, 1)
    assert shapes["res2.0.shortcut.norm.bias"] == (256,)
    assert shapes["res3.0.conv2.weight"] == (128, 128, 3, 3)
    assert shapes["res4.5.conv1.norm.weight"] == (256,)
    assert shapes["res5.2.conv3.weight"] == (2048, 512, 1, 1)
    assert "res2.1.shortcut.weight" not in shapes
    assert "res5.3.conv1.weight" not in shapes


def test_a_detectron2_file_opens_by_the_library_s_own_call_in_any_numpy(exports):
    item = find(exports, "resnet", "detectron2")
    content = item.path.read_bytes()
    with item.path.open("rb") as file:
        data = pickle.load(file, encoding="latin1")
    assert data.keys() == {"model", "__author__", "matching_heuristics"}
    assert data["matching_heuristics"] is True
    state = {to_detectron2(key): value for key, value in exports["resnet"][1].state_dict().items()}
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


def test_the_reader_of_detectron2_files_runs_no_code(tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "mark"),)

    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"model": Payload()}))
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        detectron2_format.read_pickle(tmp_path / "a.pkl")
    assert not (tmp_path / "mark").exists()


def test_onnx_takes_any_number_of_images_and_says_what_it_is(exports):
    onnx = pytest.importorskip("onnx")
    for case in ("resnet", "small-vit"):
        model = onnx.load(str(find(exports, case, "onnx").path))
        batch, *rest = model.graph.input[0].type.tensor_type.shape.dim
        assert batch.dim_param
        assert [d.dim_value for d in rest] == [3, 32, 32]
        assert {entry.domain: entry.version for entry in model.opset_import}[""] == onnx_format.OPSET
        facts = json.loads({entry.key: entry.value for entry in model.metadata_props}["snclr"])
        assert facts["mean"] == [0.485, 0.456, 0.406]
        assert facts["encoder"] == exports[case][2].to_dict()


def test_timm_adds_a_classifier_or_channels_and_keeps_the_weights(exports):
    import timm

    for case in ("resnet", "vit"):
        address = f"local-dir:{find(exports, case, 'timm').path}"
        model = timm.create_model(address, pretrained=True, num_classes=10)
        state = exports[case][1].state_dict()
        assert all(torch.equal(model.state_dict()[key], state[key]) for key in state)
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
        assert timm.create_model(address, pretrained=True, in_chans=1)(torch.zeros(2, 1, 32, 32)).ndim == 2


def test_safetensors_is_a_run_folder_again(exports):
    folder, _, spec, _ = exports["resnet"]
    copied = find(exports, "resnet", "safetensors").path
    assert load_encoder(copied)[1] == spec
    assert (copied / "config.json").read_text() == (folder / "config.json").read_text()
    ours, theirs = (load_file(path / "encoder.safetensors") for path in (folder, copied))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@torch.no_grad()
def test_the_head_count_travels_and_shapes_alone_would_not_tell(exports):
    import timm

    _, encoder, spec, _ = exports["vit"]
    folder = find(exports, "vit", "timm").path
    assert json.loads((folder / "config.json").read_text())["model_args"]["num_heads"] == 12
    assert timm.create_model(f"local-dir:{folder}", pretrained=True).blocks[0].attn.num_heads == 12
    wrong = timm.create_model(spec.architecture, num_classes=0, img_size=32, patch_size=spec.model_args["patch_size"])
    assert wrong.blocks[0].attn.num_heads == 6
    wrong.load_state_dict(load_file(folder / "model.safetensors"), strict=True)  # no complaint
    images = torch.randn(2, 3, 32, 32)
    assert (wrong.eval()(images) - encoder(images)).abs().max() > 1e-2


def alter_heads(path, heads):
    config = json.loads(path.read_text())
    config["snclr"]["encoder"]["heads"] = config["snclr"]["encoder"]["model_args"]["num_heads"] = heads
    config["model_args"]["num_heads"] = heads
    path.write_text(json.dumps(config))


def test_an_altered_head_count_is_noticed_by_loading_and_by_exporting(vit, tmp_path):
    save_encoder(vit[1], vit[2], tmp_path)
    alter_heads(tmp_path / "config.json", 6)
    with pytest.raises(UserError, match="different encoders"):
        load_encoder(tmp_path)
    with pytest.raises(UserError, match="different encoders"):
        snclr.export(tmp_path, "timm")


def test_a_config_that_loses_the_head_count_fails_the_check_and_is_deleted(vit, tmp_path, monkeypatch):
    def careless(encoder, spec, folder, *, extra):
        save_encoder(encoder, spec, folder, extra=extra)
        config = json.loads((folder / "config.json").read_text())
        del config["model_args"]["num_heads"]
        (folder / "config.json").write_text(json.dumps(config))

    monkeypatch.setattr(timm_format, "save_encoder", careless)
    with pytest.raises(UserError, match=r"timm: .*features differ from the encoder's by .* so it was deleted"):
        snclr.export(vit[0], "timm", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_tensors_under_each_other_s_names_fail_the_check_and_are_deleted(resnet, tmp_path, monkeypatch):
    """The shapes are the same, so only running the network by the other library's names shows it."""

    def mixed_up(c):
        swap = {"conv1": "conv2", "conv2": "conv1"} if (c.stage, c.block) == (1, 0) else {}
        name, norm = torchvision_names(c)
        return name, norm.replace(c.place.replace("conv", "bn"), swap.get(c.place, c.place).replace("conv", "bn"))

    monkeypatch.setattr(detectron2_format, "torchvision_names", mixed_up)
    with pytest.raises(UserError, match=r"detectron2: .*features differ"):
        snclr.export(resnet[0], "detectron2", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_missing_tensor_is_named_and_nothing_is_left(resnet, tmp_path, monkeypatch):
    monkeypatch.setattr(detectron2_format, "convolutions", lambda layout: list(convolutions(layout))[:-1])
    with pytest.raises(UserError, match=r"could not be loaded back \(6 tensors are not those of a ResNet-18: res5\.1"):
        snclr.export(resnet[0], "detectron2", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_features_that_are_not_numbers_fail_the_check(tmp_path):
    folder, encoder, spec = make_run(tmp_path / "run", "resnet10-tiny", image_size=32)
    with torch.no_grad():
        encoder.bn1.weight.fill_(float("nan"))
    save_encoder(encoder, spec, folder)
    with pytest.raises(UserError, match="features differ"):
        snclr.export(folder, "safetensors")
    assert list((folder / "export").iterdir()) == []


def test_a_write_that_fails_leaves_the_earlier_export(resnet, tmp_path, monkeypatch):
    snclr.export(resnet[0], "torchvision", tmp_path)
    before = (tmp_path / "torchvision" / "encoder.pth").read_bytes()

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.save", no_space)
    with pytest.raises(UserError, match=r"torchvision: could not write to .*No space left"):
        snclr.export(resnet[0], "torchvision", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["torchvision"]
    assert (tmp_path / "torchvision" / "encoder.pth").read_bytes() == before


def test_an_earlier_export_is_replaced_and_other_files_are_not(resnet, tmp_path):
    old = tmp_path / "torchvision" / "encoder.pth"
    old.parent.mkdir()
    old.write_bytes(b"an earlier export")
    snclr.export(resnet[0], "torchvision", tmp_path)
    assert len(old.read_bytes()) > 1_000_000
    (old.parent / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"files that no export wrote \(notes\.txt\)"):
        snclr.export(resnet[0], "torchvision", tmp_path)
    assert (old.parent / "notes.txt").read_text() == "mine"
    (tmp_path / "mmdet").write_text("a file")
    with pytest.raises(UserError, match="is in the way"):
        snclr.export(resnet[0], "mmdet", tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "to", "words"),
    [
        ("resnet18", {"image_size": 32}, "torchvision", ["low-resolution stem 'small'", "fits onnx, safetensors"]),
        ("resnet18", {"image_size": 32}, "timm", ["low-resolution stem 'small'", "fits onnx, safetensors"]),
        ("resnet10-tiny", {"image_size": 96}, "detectron2", ["not one of torchvision's", "fits timm, onnx"]),
        ("vit_tiny", {"image_size": 32}, "mmdet", ["not one of torchvision's", "fits timm, onnx, safetensors"]),
        ("wide_resnet50_2", {"image_size": 96}, "mmdet", ["wide", "fits torchvision, timm, detectron2"]),
        ("swin_tiny_patch4_window7_224", {"image_size": 224}, "timm", ["misreads", "fits onnx, safetensors"]),
    ],
)
def test_formats_that_do_not_fit_are_refused_with_those_that_do(name, options, to, words):
    spec = resolve_encoder(name, **options)
    with pytest.raises(UserError) as caught:
        formats.refuse_misfits(["safetensors", to], spec)
    for word in words:
        assert word in str(caught.value)


def test_nothing_is_written_when_one_of_several_does_not_fit(tmp_path):
    folder, _, _ = make_run(tmp_path / "run", "resnet10-tiny", image_size=32)
    with pytest.raises(UserError, match="torchvision cannot hold this encoder"):
        snclr.export(folder, "safetensors,torchvision")
    assert not (folder / "export").exists()


def test_missing_onnx_packages_are_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxruntime" else object())
    with pytest.raises(UserError, match=r"onnxruntime is not installed; pip install 'snclr\[onnx\]'"):
        formats.refuse_misfits(["onnx"], resolve_encoder("resnet18", image_size=96))


@pytest.mark.parametrize("to", ["tensorflow", "timm,tensorflow", "", [], ","])
def test_unknown_formats_name_the_known_ones(resnet, to):
    with pytest.raises(UserError, match="torchvision, timm, detectron2, mmdet, onnx, safetensors"):
        snclr.export(resnet[0], to)


def test_the_command_line(resnet, tmp_path, capsys):
    run, out = str(resnet[0]), str(tmp_path)
    assert main(["export", run, "--to", "torchvision,mmdet", "--out", out]) == 0
    printed = capsys.readouterr().out
    assert f"torchvision: wrote {tmp_path / 'torchvision' / 'encoder.pth'}; loaded back" in printed
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


def test_the_function_and_the_package_of_one_name():
    """Python puts the package in the function's place once a part of it is imported; both must do."""
    code = (
        "import snclr\n"
        "assert callable(snclr.export) and snclr.export.__name__ == 'export'\n"
        "import snclr.export.encoder\n"
        "assert callable(snclr.export) and snclr.export.encoder.load_encoder\n"
        "try: snclr.export('nowhere', 'timm')\n"
        "except snclr.UserError as error: assert 'nowhere' in str(error)\n"
        "else: raise SystemExit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
