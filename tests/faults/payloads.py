"""Promise 9: opening a file never runs its code. Each payload would make a file, the canary, if it were run."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import pickle
import shutil
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from snclr.train import checkpoint as module
from tests.faults.harness import SETTINGS, Workshop

Payload = Callable[[Workshop, Path, Path], list[str]]
"""(shop, a folder to work in, the canary) → the arguments of the command that opens the hostile file."""


class Bomb:
    """A pickle that makes the canary when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


def payload(shop: Workshop, seed: int) -> None:
    """Open one hostile file by the command that a person would use: it is refused or harmless, and nothing is run."""
    name = list(PAYLOADS)[seed % len(PAYLOADS)]
    folder = shop.place("payload")
    folder.mkdir()
    canary = folder / "canary"
    command = shop.snclr(*PAYLOADS[name](shop, folder, canary), faults=[{"name": "tools_first", "path": str(folder)}])
    code = command.wait()
    assert not canary.exists(), f"{name}: its code was run"
    assert code == (0 if name in HARMLESS else 2), f"{name}: exit code {code}\n{command.output}"
    assert "Traceback" not in command.output, f"{name}:\n{command.output}"
    shutil.rmtree(folder)


# -------------------- weights for --init-from


def _init_from(shop: Workshop, folder: Path, weights: Path) -> list[str]:
    settings = [f"--{name}={value}" for name, value in {**SETTINGS, "epochs": 2}.items()]
    return [
        *("pretrain", f"--data={shop.images}", f"--out={folder / 'out'}", "--workers=0", f"--init-from={weights}"),
        *settings,
    ]


def _pickled(write: Callable[[Any, Path], None], name: str, wrap: Callable[[Any], Any] = lambda bomb: bomb) -> Payload:
    def make(shop: Workshop, folder: Path, canary: Path) -> list[str]:
        write(wrap(Bomb(canary)), folder / name)
        return _init_from(shop, folder, folder / name)

    return make


def _raw(content: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(content))


def _legacy(content: Any, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


def _script(shop: Workshop, folder: Path, canary: Path) -> list[str]:
    """A TorchScript archive: a program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still about
        torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), str(folder / "w.pt"))
    return _init_from(shop, folder, folder / "w.pt")


def _described(shop: Workshop, folder: Path, canary: Path) -> list[str]:
    """A safetensors file whose description names code instead of an encoder."""
    described = {"encoder": {"heads": f"__import__('os').mkdir({str(canary)!r})", "name": "os.mkdir"}}
    save_file({"conv1.weight": torch.ones(1)}, folder / "w.safetensors", {"snclr": json.dumps(described)})
    return _init_from(shop, folder, folder / "w.safetensors")


# -------------------- run folders from somebody else


def _run(shop: Workshop, folder: Path) -> Path:
    return shutil.copytree(shop.undisturbed(), folder / "run")


def _resume(run: Path) -> list[str]:
    return ["pretrain", "--resume", f"--out={run}"]


def _config(text: str) -> Payload:
    def make(shop: Workshop, folder: Path, canary: Path) -> list[str]:
        run = _run(shop, folder)
        (run / "config.yaml").write_text(
            (run / "config.yaml").read_text() + text.replace("CANARY", json.dumps(str(canary)))
        )
        return _resume(run)

    return make


def _resign(checkpoint: Path) -> None:
    """Make the manifest fit what is there: the hashes guard against damage, not against a forger."""
    body = json.loads((checkpoint / module.MANIFEST).read_bytes())
    del body["manifest_sha256"]
    for name in body["files"]:
        data = (checkpoint / name).read_bytes()
        body["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    (checkpoint / module.MANIFEST).write_bytes(module._manifest_bytes(body))


def _checkpoint(name: str, content: Callable[[Path], bytes]) -> Payload:
    def make(shop: Workshop, folder: Path, canary: Path) -> list[str]:
        run = _run(shop, folder)
        for checkpoint in (run / "checkpoints").glob("step-*"):
            (checkpoint / name).write_bytes(content(canary))
            _resign(checkpoint)
        return ["neighbors", str(run)]

    return make


def _encoder_config(**changes: Any) -> Payload:
    """The encoder's config.json asks for another architecture or arguments."""

    def make(shop: Workshop, folder: Path, canary: Path) -> list[str]:
        run = _run(shop, folder)
        hub = folder / "hub"
        hub.mkdir()
        torch.save({"x": Bomb(canary)}, hub / "pytorch_model.bin")
        (hub / "config.json").write_text('{"architecture": "resnet18"}')
        (hub / "hubconf.py").write_text(f"import os; os.mkdir({str(canary)!r})")
        content = json.loads((run / "config.json").read_text())
        for name, value in changes.items():
            content["snclr"]["encoder"][name] = json.loads(json.dumps(value).replace("HUB", str(hub)))
        (run / "config.json").write_text(json.dumps(content))
        return ["knn", str(run), "--data", str(shop.images), "--device=cpu"]

    return make


def _embeddings(shop: Workshop, folder: Path, canary: Path) -> list[str]:
    """A .npy of Python objects."""
    np.save(folder / "f.npy", np.array([Bomb(canary)], dtype=object), allow_pickle=True)
    (folder / "f.keys.json").write_text('{"keys": ["a"], "labels": null, "metadata": {}}')
    image = next(shop.images.rglob("0.png"))
    return ["search", str(shop.undisturbed()), str(image), "--embeddings", str(folder / "f.npy"), "--device=cpu"]


# -------------------- data


def _data(spec: str) -> Payload:
    def make(shop: Workshop, folder: Path, canary: Path) -> list[str]:
        settings = [f"--{name}={value}" for name, value in SETTINGS.items()]
        return ["pretrain", f"--data={spec.replace('CANARY', str(canary))}", f"--out={folder / 'out'}", *settings]

    return make


def _list(shop: Workshop, folder: Path, canary: Path) -> list[str]:
    (folder / "list.txt").write_text(f"$(mkdir {canary})\n`mkdir {canary}`\n| mkdir {canary}\n")
    return _data(str(folder / "list.txt"))(shop, folder, canary)


def _postscript(shop: Workshop, folder: Path, canary: Path) -> list[str]:
    """EPS under an image's name, and a Ghostscript that betrays being started (see `tools_first`)."""
    images = shutil.copytree(shop.images, folder / "images")
    (images / "class0" / "page.jpg").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    )
    for name in ("gs", "gswin64c"):
        (folder / name).write_text(f"#!/bin/sh\nmkdir {canary}\n")
        (folder / name).chmod(0o755)
    settings = [f"--{name}={value}" for name, value in {**SETTINGS, "epochs": 2}.items()]
    return ["pretrain", f"--data={images}", f"--out={folder / 'out'}", "--workers=0", *settings]


def _tar(shop: Workshop, folder: Path, canary: Path) -> list[str]:
    """A shard whose members would lie outside, are links or devices, or are pickles; between them are good images."""
    with tarfile.open(folder / "shard.tar", "w") as tar:
        for i in range(64):
            picture = io.BytesIO()
            Image.fromarray(np.full((20, 20, 3), 3 * i, dtype=np.uint8)).save(picture, "PNG")
            _member(tar, f"{i:03d}.png", picture.getvalue())
        for name in (f"../{canary.name}", f"../../{canary.name}.png", str(canary), f"{canary}.jpg"):
            _member(tar, name, b"no image")
        _member(tar, "zzz.pkl", pickle.dumps(Bomb(canary)))
        _member(tar, "064.pyd", pickle.dumps(Bomb(canary)))
        _member(tar, "064.pth", pickle.dumps(Bomb(canary)))
        for kind, target in ((tarfile.SYMTYPE, "/etc/passwd"), (tarfile.LNKTYPE, "../../etc/passwd")):
            link = tarfile.TarInfo(f"link{target.count('.')}.png")
            link.type, link.linkname = kind, target
            tar.addfile(link)
        pipe = tarfile.TarInfo("pipe.png")
        pipe.type = tarfile.FIFOTYPE
        tar.addfile(pipe)
    settings = [f"--{name}={value}" for name, value in {**SETTINGS, "epochs": 2, "max-bad-share": 0.2}.items()]
    return ["pretrain", f"--data={folder / 'shard.tar'}", f"--out={folder / 'out'}", "--workers=0", *settings]


def _member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def _manifest(shop: Workshop, folder: Path, canary: Path) -> list[str]:
    """A manifest of shards that names programs and files elsewhere as its shards."""
    shards = [{"name": f"pipe:mkdir {canary}", "url": f"pipe:mkdir {canary}"}, {"name": "../../../etc/passwd"}]
    (folder / "shards.json").write_text(json.dumps({"schema": "snclr-shards-1", "shards": shards}))
    return _data(str(folder / "shards.json"))(shop, folder, canary)


PAYLOADS: dict[str, Payload] = {
    "pickle in a zip .pt": _pickled(torch.save, "w.pt"),
    "pickle nested in a state dict": _pickled(
        torch.save, "w.pth", lambda b: {"state_dict": {"a": torch.ones(1), "b": b}}
    ),
    "pickle in a legacy .pth": _pickled(_legacy, "w.pth", lambda b: {"model": {"x": [b]}}),
    "bare pickle": _pickled(_raw, "w.pkl"),
    "pickle called .safetensors": _pickled(_raw, "w.safetensors"),
    "pickle of a dict's key": _pickled(_raw, "w.pt", lambda b: {("k", 1): b}),
    "TorchScript": _script,
    "hostile description in safetensors": _described,
    "config.yaml: python/object/apply": _config("\nx: !!python/object/apply:os.mkdir [CANARY]\n"),
    "config.yaml: python/object/new": _config("\nx: !!python/object/new:os.mkdir {args: [CANARY]}\n"),
    "config.yaml: python/name": _config("\nencoder: !!python/name:os.mkdir ''\n"),
    "config.yaml: template text": _config("\nencoder: '${__import__(\"os\").mkdir(CANARY)}'\n"),
    "config.yaml: encoder from a hub": _config("\nencoder: hf-hub:somebody/with-remote-code\n"),
    "checkpoint: pickle as tensors": _checkpoint(module.TENSORS, lambda canary: pickle.dumps(Bomb(canary))),
    "checkpoint: pickle as info": _checkpoint(module.INFO, lambda canary: pickle.dumps(Bomb(canary), protocol=0)),
    "encoder: local-dir with a pickle": _encoder_config(architecture="local-dir:HUB"),
    "encoder: remote code": _encoder_config(architecture="hf-hub:somebody/with-remote-code"),
    "encoder: another library": _encoder_config(library="torch.hub", architecture="HUB"),
    "encoder: arguments that read files": _encoder_config(
        model_args={"pretrained": True, "checkpoint_path": "HUB/pytorch_model.bin"}
    ),
    "embeddings of Python objects": _embeddings,
    "data: pipe URL": _data("pipe:mkdir CANARY"),
    "data: pipe URL of shards": _data("pipe:mkdir CANARY; cat {000..003}.tar"),
    "data: shell in a name": _data("$(mkdir CANARY).tar"),
    "data: remote file address": _data("file:///etc/passwd"),
    "list file with shell commands": _list,
    "EPS under another name": _postscript,
}
if importlib.util.find_spec("snclr.data.shards") is not None:
    PAYLOADS |= {"shard with ../, links, pickles": _tar, "manifest of shards with programs": _manifest}
HARMLESS = ("EPS under another name", "shard with ../, links, pickles")
"""What is not refused: the good images beside it are trained on."""
