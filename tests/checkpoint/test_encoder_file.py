"""Encoder files: exact round trip, loading without snclr, damaged and inconsistent files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from snclr.checkpoint.encoder_file import load_encoder, loading_snippet, save_encoder
from snclr.errors import UserError
from snclr.io.hashing import weights_digest
from snclr.models.encoders import build_encoder, resolve_encoder
from tests.helpers.photos import as_evaluated, write_photos

CASES = {
    "resnet18-standard": ("resnet18", {"image_size": 96}),
    "resnet18-small": ("resnet18", {"image_size": 32}),
    "narrow-half": ("resnet10-narrow", {"image_size": 32, "stem": "half"}),
    "tiny-standard": ("resnet10-tiny", {"image_size": 96}),
    "vit-12-heads": ("vit_small", {"image_size": 32, "heads": 12, "sincos": True}),
}


def trained(name, options):
    """Return an encoder with changed weights and running statistics, and its features of some images."""
    spec = resolve_encoder(name, **options)
    torch.manual_seed(0)
    encoder = build_encoder(spec)
    images = torch.randn(4, 3, spec.image_size, spec.image_size)
    encoder.train()(images)
    with torch.no_grad():
        for p in encoder.parameters():
            p.add_(0.02 * torch.randn_like(p))
        return encoder.eval(), spec, images, encoder(images)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    made = {}
    for case, (name, options) in CASES.items():
        folder = tmp_path_factory.mktemp(case)
        encoder, spec, images, features = trained(name, options)
        save_encoder(encoder, spec, folder, extra={"epoch": 3})
        made[case] = (folder, encoder, spec, images, features)
    return made


@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_exact(runs, case):
    folder, encoder, spec, images, features = runs[case]
    state = torch.get_rng_state()
    loaded, loaded_spec = load_encoder(folder)
    assert torch.equal(torch.get_rng_state(), state)
    assert loaded_spec == spec
    assert not loaded.training
    ours, theirs = encoder.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), features, rtol=0, atol=1e-6)


def test_printed_snippets_load_the_weights_without_snclr(runs, tmp_path):
    """Run each snippet as printed, then timm's local-dir if the snippet has it, all in one process."""
    lines = ["import sys", "import torch", "torch.set_num_threads(1)", "results = {}"]
    photos = write_photos(tmp_path)
    for case, (folder, _, spec, images, _) in runs.items():
        torch.save(images, tmp_path / f"{case}.pt")
        lines.append(loading_snippet(spec, folder))
        lines.append(f"images = torch.load({str(tmp_path / f'{case}.pt')!r}, weights_only=True)")
        lines.append(f"results[{case!r}] = encoder(images)")
        prepared = {photo: f"preprocess(Image.open({str(tmp_path / photo)!r}))" for photo in photos}
        lines += [f"results['{case}-{photo}'] = encoder({code})" for photo, code in prepared.items()]
        if spec.stem == "standard":
            call = loading_snippet(spec, folder).split("# or, with timm 1.0.26 or newer:\n# ")[1].splitlines()[0]
            lines += ["import timm", f"results[{case!r} + '-local-dir'] = {call}.eval()(images)"]
    lines.append("assert not any(name.split('.')[0] == 'snclr' for name in sys.modules)")
    lines.append(f"torch.save({{key: value.detach() for key, value in results.items()}}, {str(tmp_path / 'out.pt')!r})")
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, cwd=tmp_path, timeout=280)
    results = torch.load(tmp_path / "out.pt", weights_only=True)
    for case, (_, encoder, spec, _, _) in runs.items():
        for photo in photos:  # the printed preprocessing gives the features of `snclr embed`
            ours = as_evaluated(encoder, spec, tmp_path / photo)
            torch.testing.assert_close(results.pop(f"{case}-{photo}"), ours, rtol=1e-4, atol=1e-4, msg=case)
    local_dirs = {key.removesuffix("-local-dir") for key in results if key.endswith("-local-dir")}
    assert local_dirs == {"resnet18-standard", "tiny-standard", "vit-12-heads"}
    for key, result in results.items():
        torch.testing.assert_close(result, runs[key.removesuffix("-local-dir")][4], rtol=0, atol=1e-6, msg=key)


def test_the_snippet_fits_a_terminal_of_80_columns(runs):
    for name, (_, _, spec, _, _) in runs.items():
        assert max(map(len, loading_snippet(spec, Path("runs/photos")).splitlines())) <= 80, name


def test_timm_refuses_a_low_resolution_stem(runs):
    import timm

    with pytest.raises(RuntimeError, match="size mismatch"):
        timm.create_model(f"local-dir:{runs['resnet18-small'][0]}", pretrained=True)


def test_the_snippet_has_no_local_dir_if_timm_misreads_the_weights(tmp_path):
    spec = resolve_encoder("swin_tiny_patch4_window7_224", image_size=224)
    assert "local-dir" not in loading_snippet(spec, tmp_path)


def test_the_config_describes_the_preprocessing_of_images(runs):
    folder = runs["vit-12-heads"][0]
    config = json.loads((folder / "config.json").read_text())
    assert config["architecture"] == "vit_small_patch16_224"
    assert config["model_args"]["num_heads"] == 12
    assert config["pretrained_cfg"]["mean"] == config["snclr"]["mean"] == [0.485, 0.456, 0.406]
    assert config["pretrained_cfg"]["input_size"] == [3, 32, 32]
    assert config["snclr"]["encoder"]["heads"] == 12
    assert config["snclr"]["extra"] == {"epoch": 3}
    assert config["snclr"]["weights_sha256"] == weights_digest(load_file(folder / "encoder.safetensors"))
    assert {path.name for path in folder.iterdir()} == {"config.json", "encoder.safetensors"}


def test_channels_last_and_half_precision_are_saved_as_contiguous_float32(tmp_path):
    encoder, spec, _, _ = trained("resnet10-tiny", {"image_size": 32})
    save_encoder(encoder.to(memory_format=torch.channels_last).bfloat16(), spec, tmp_path)
    loaded, _ = load_encoder(tmp_path)
    assert torch.equal(loaded.conv1.weight, encoder.conv1.weight.float())
    assert loaded.conv1.weight.dtype == torch.float32


@pytest.fixture
def run(tmp_path):
    encoder, spec, _, _ = trained("resnet10-tiny", {"image_size": 32})
    save_encoder(encoder, spec, tmp_path)
    return tmp_path, encoder, spec


def test_a_folder_without_an_encoder_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        load_encoder(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no config\.json"):
        load_encoder(tmp_path)


def test_missing_weights_are_refused(run):
    (run[0] / "encoder.safetensors").unlink()
    with pytest.raises(UserError, match=r"no encoder\.safetensors"):
        load_encoder(run[0])


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"snclr": 1}', b"\xff\xfe", b"[" * 100_000, b"{}"])
def test_a_damaged_config_is_refused(run, content):
    (run[0] / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"config\.json"):
        load_encoder(run[0])


def test_a_newer_schema_is_refused(run):
    path = run[0] / "config.json"
    config = json.loads(path.read_text())
    config["snclr"]["schema"] = 99
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="schema 99"):
        load_encoder(run[0])


def test_flipped_bits_of_the_weights_file_are_detected(run):
    folder, _, _ = run
    path = folder / "encoder.safetensors"
    content = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    header = 8 + int.from_bytes(content[:8], "little")
    offsets = torch.randint(0, header, (12,), generator=generator).tolist()
    offsets += torch.randint(header, len(content), (12,), generator=generator).tolist()
    for offset in offsets:
        damaged = bytearray(content)
        damaged[offset] ^= 1 << (offset % 8)
        path.write_bytes(damaged)
        with pytest.raises(UserError):
            load_encoder(folder)


@pytest.mark.parametrize("keep", [0, 7, 8, 500, -1])
def test_a_truncated_weights_file_is_detected(run, keep):
    path = run[0] / "encoder.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"encoder\.safetensors"):
        load_encoder(run[0])


def test_weights_without_a_description_are_refused(run):
    path = run[0] / "encoder.safetensors"
    save_file(load_file(path), path)
    with pytest.raises(UserError, match="not written by snclr"):
        load_encoder(run[0])


def test_files_of_two_runs_are_refused(run, runs):
    config = runs["vit-12-heads"][0] / "config.json"
    (run[0] / "config.json").write_bytes(config.read_bytes())
    with pytest.raises(UserError, match="different encoders"):
        load_encoder(run[0])


def test_a_crash_between_the_two_files_leaves_a_folder_that_loads(run, monkeypatch):
    folder, encoder, spec = run
    with torch.no_grad():
        encoder.conv1.weight.add_(1)
    replace, calls = os.replace, []

    def crash_on_second(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        replace(*args)

    monkeypatch.setattr("os.replace", crash_on_second)
    with pytest.raises(KeyboardInterrupt):
        save_encoder(encoder, spec, folder)
    assert torch.equal(load_encoder(folder)[0].conv1.weight, encoder.conv1.weight)


def test_a_full_disk_keeps_the_old_files_and_the_error_gives_the_bytes_needed(run, monkeypatch):
    folder, encoder, spec = run
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with torch.no_grad():
        encoder.conv1.weight.add_(1)
    with pytest.raises(UserError, match=r"encoder\.safetensors.*No space left.*[\d,]+ bytes needed"):
        save_encoder(encoder, spec, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_encoder_that_does_not_fit_its_spec_is_not_saved(tmp_path):
    spec = resolve_encoder("resnet10-tiny", image_size=32)
    with pytest.raises(UserError, match="do not fit"):
        save_encoder(build_encoder(resolve_encoder("resnet10-narrow", image_size=32)), spec, tmp_path)
    with pytest.raises(UserError, match="do not fit"):
        save_encoder(torch.nn.Sequential(build_encoder(spec)), spec, tmp_path)
    six, twelve = (resolve_encoder("vit_small", image_size=32, heads=heads) for heads in (6, 12))
    with pytest.raises(UserError, match="6 attention heads, but its description has 12"):
        save_encoder(build_encoder(six), twelve, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_description_with_inconsistent_fields_is_refused(run):
    folder, _, _ = run
    path = folder / "encoder.safetensors"
    state = load_file(path)
    config = json.loads((folder / "config.json").read_text())
    for change in ({"num_features": 64}, {"sincos": True}, {"model_args": {"num_heads": 3}}, {"stem": "standard"}):
        changed = config | {"snclr": config["snclr"] | {"encoder": config["snclr"]["encoder"] | change}}
        (folder / "config.json").write_text(json.dumps(changed))
        save_file(state, path, metadata={"snclr": json.dumps(changed["snclr"])})
        with pytest.raises(UserError):
            load_encoder(folder)
