"""Promise 9: opening a file never runs its code. Each payload creates a file, the canary, if its code is run.

Each payload is also opened in an unsafe way, and the canary must exist then: otherwise it proves nothing.
The error message is checked too, so that a payload is not refused for an unrelated mistake in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from snclr.checkpoint import format as module
from snclr.data.shards.manifest import SCHEMA as SHARDS_SCHEMA
from tests.reliability.harness import SETTINGS, Sandbox

Maker = Callable[[Sandbox, Path, Path], list[str]]
"""(sandbox, temporary folder, canary) → the arguments of the command that opens the malicious file."""
UnsafeOpen = Callable[[Path, Path], object]
"""(folder, canary): opens the file in an unsafe way, which creates the canary."""


@dataclass(frozen=True)
class Payload:
    """A malicious file, the pattern of the message that refuses it, and unsafe ways to open it that run its code."""

    make: Maker
    message: str
    unsafe: tuple[UnsafeOpen, ...]
    code: int = 2


class MaliciousPickle:
    """A pickle that creates the canary when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


def payload(sandbox: Sandbox, seed: int) -> None:
    """Open one malicious file with a command of snclr: it is refused or harmless, and its code is not run."""
    name, case = list(PAYLOADS.items())[seed % len(PAYLOADS)]
    folder = sandbox.new_path("payload")
    folder.mkdir()
    canary = folder / "canary"
    command = sandbox.snclr(*case.make(sandbox, folder, canary), faults=[{"name": "tools_first", "path": str(folder)}])
    code = command.wait()
    assert not canary.exists(), f"{name}: its code was run"
    assert code == case.code, f"{name}: exit code {code}\n{command.output}"
    assert "Traceback" not in command.output, f"{name}:\n{command.output}"
    assert re.search(case.message, command.output), f"{name}: refused for another reason\n{command.output}"
    for number, unsafe in enumerate(case.unsafe):
        assert _runs(unsafe, folder, canary), f"{name}: unsafe opening {number} does not run the code"
    shutil.rmtree(folder)


def _runs(unsafe: UnsafeOpen, folder: Path, canary: Path) -> bool:
    """Whether opening the payload in this way runs its code; it may fail afterwards."""
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unsafe(folder, canary)
    if not canary.exists():
        return False
    canary.rmdir() if canary.is_dir() else canary.unlink()
    return True


# -------------------- unsafe ways to open a file


def _torch_load(name: str) -> UnsafeOpen:
    return lambda folder, canary: torch.load(folder / name, weights_only=False)


def _pickle_load(name: str) -> UnsafeOpen:
    return lambda folder, canary: pickle.loads((folder / name).read_bytes())


def _yaml_load(folder: Path, canary: Path) -> Any:
    return yaml.unsafe_load((folder / "run" / "config.yaml").read_text())


def _call_named_function(folder: Path, canary: Path) -> None:
    _yaml_load(folder, canary)["encoder"](canary)


def _evaluate_template(folder: Path, canary: Path) -> None:
    eval(_yaml_load(folder, canary)["encoder"].removeprefix("${").removesuffix("}"))


def _evaluate_description(folder: Path, canary: Path) -> None:
    with safe_open(folder / "w.safetensors", "pt") as file:
        eval(json.loads(file.metadata()["snclr"])["encoder"]["heads"])


def _checkpoint_pickle(name: str) -> UnsafeOpen:
    return lambda folder, canary: pickle.loads(next(folder.glob(f"run/checkpoints/step-*/{name}")).read_bytes())


def _hub_code(folder: Path, canary: Path) -> None:
    torch.hub.load(str(folder / "hub"), "anything", source="local")


def _shell(command: Callable[[Path, Path], str]) -> UnsafeOpen:
    return lambda folder, canary: subprocess.run(
        command(folder, canary), shell=True, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )


def _listed(line: int) -> UnsafeOpen:
    return _shell(lambda folder, canary: f"cat {(folder / 'list.txt').read_text().splitlines()[line]}")


def _ghostscript(folder: Path, canary: Path) -> None:
    """Let Pillow open EPS, in a new process because it caches the path of Ghostscript."""
    command = [sys.executable, "-c", "import sys; from PIL import Image; Image.open(sys.argv[1]).load()"]
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    page = folder / "images" / "class0" / "page.jpg"
    subprocess.run([*command, str(page)], env=environment, capture_output=True, check=False)


def _unpack(member: Callable[[Path], str]) -> UnsafeOpen:
    def open_unsafely(folder: Path, canary: Path) -> None:
        trusting: Any = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
        (folder / "unpacked").mkdir(exist_ok=True)
        with tarfile.open(folder / "shard.tar") as tar:
            tar.extract(member(canary), folder / "unpacked", **trusting)

    return open_unsafely


def _unpickle_member(name: str) -> UnsafeOpen:
    def open_unsafely(folder: Path, canary: Path) -> None:
        with tarfile.open(folder / "shard.tar") as tar:
            file = tar.extractfile(name)
            assert file is not None
            pickle.loads(file.read())

    return open_unsafely


# -------------------- weights for --init-from


def _init_from(sandbox: Sandbox, folder: Path, weights: Path) -> list[str]:
    settings = [f"--{name}={value}" for name, value in {**SETTINGS, "epochs": 2}.items()]
    return [
        *("pretrain", f"--data={sandbox.images}", f"--out={folder / 'out'}", "--workers=0", f"--init-from={weights}"),
        *settings,
    ]


def _pickled(write: Callable[[Any, Path], None], name: str, wrap: Callable[[Any], Any] = lambda value: value) -> Maker:
    def make(sandbox: Sandbox, folder: Path, canary: Path) -> list[str]:
        write(wrap(MaliciousPickle(canary)), folder / name)
        return _init_from(sandbox, folder, folder / name)

    return make


def _raw(content: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(content))


def _legacy(content: Any, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


class _Program(torch.nn.Module):
    """A module that TorchScript runs while it is loaded: `from_file` creates the file that it maps."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.mapped = path, torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @torch.jit.export
    def __getstate__(self):  # type: ignore[no-untyped-def]
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]):  # type: ignore[no-untyped-def]
        self.path, self.training = state[0], state[1]
        self.mapped = torch.from_file(self.path, True, 1)  # assigned, because unused results are optimized away


def _script(sandbox: Sandbox, folder: Path, canary: Path) -> list[str]:
    """Write a TorchScript archive, which is a program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.save(torch.jit.script(_Program(str(canary))), str(folder / "w.pt"))
    return _init_from(sandbox, folder, folder / "w.pt")


def _described(sandbox: Sandbox, folder: Path, canary: Path) -> list[str]:
    """Write a safetensors file whose description contains code instead of an encoder."""
    described = {"encoder": {"heads": f"__import__('os').mkdir({str(canary)!r})", "name": "os.mkdir"}}
    save_file({"conv1.weight": torch.ones(1)}, folder / "w.safetensors", {"snclr": json.dumps(described)})
    return _init_from(sandbox, folder, folder / "w.safetensors")


# -------------------- run directories


def _run(sandbox: Sandbox, folder: Path) -> Path:
    return shutil.copytree(sandbox.reference_run(), folder / "run")


def _resume(run: Path) -> list[str]:
    return ["pretrain", "--resume", f"--out={run}"]


def _config(text: str) -> Maker:
    def make(sandbox: Sandbox, folder: Path, canary: Path) -> list[str]:
        run = _run(sandbox, folder)
        (run / "config.yaml").write_text(
            (run / "config.yaml").read_text() + text.replace("CANARY", json.dumps(str(canary)))
        )
        return _resume(run)

    return make


def _resign(checkpoint: Path) -> None:
    """Update the hashes in the manifest: they detect damage, not tampering."""
    body = json.loads((checkpoint / module.MANIFEST).read_bytes())
    del body["manifest_sha256"]
    for name in body["files"]:
        data = (checkpoint / name).read_bytes()
        body["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    (checkpoint / module.MANIFEST).write_bytes(module._manifest_bytes(body))


def _checkpoint(name: str, content: Callable[[Path], bytes]) -> Maker:
    def make(sandbox: Sandbox, folder: Path, canary: Path) -> list[str]:
        run = _run(sandbox, folder)
        for checkpoint in (run / "checkpoints").glob("step-*"):
            (checkpoint / name).write_bytes(content(canary))
            _resign(checkpoint)
        return ["neighbors", str(run)]

    return make


def _encoder_config(**changes: Any) -> Maker:
    """Change the description of the encoder, in config.json and in the weights file."""

    def make(sandbox: Sandbox, folder: Path, canary: Path) -> list[str]:
        run = _run(sandbox, folder)
        hub = folder / "hub"
        hub.mkdir()
        torch.save({"x": MaliciousPickle(canary)}, hub / "pytorch_model.bin")
        (hub / "config.json").write_text('{"architecture": "resnet18"}')
        (hub / "hubconf.py").write_text(f"import os; os.mkdir({str(canary)!r})")
        content = json.loads((run / "config.json").read_text())
        for name, value in changes.items():
            content["snclr"]["encoder"][name] = json.loads(json.dumps(value).replace("HUB", str(hub)))
        (run / "config.json").write_text(json.dumps(content))
        weights = run / "encoder.safetensors"
        with safe_open(weights, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        save_file(tensors, weights, {"snclr": json.dumps(content["snclr"])})
        return ["knn", str(run), "--data", str(sandbox.images), "--device=cpu"]

    return make


def _embeddings(sandbox: Sandbox, folder: Path, canary: Path) -> list[str]:
    """Write a .npy file of Python objects."""
    np.save(folder / "f.npy", np.array([MaliciousPickle(canary)], dtype=object), allow_pickle=True)
    (folder / "f.keys.json").write_text('{"keys": ["a"], "labels": null, "metadata": {}}')
    image = next(sandbox.images.rglob("0.png"))
    return ["search", str(sandbox.reference_run()), str(image), "--embeddings", str(folder / "f.npy"), "--device=cpu"]


# -------------------- data


def _data(spec: str) -> Maker:
    def make(sandbox: Sandbox, folder: Path, canary: Path) -> list[str]:
        settings = [f"--{name}={value}" for name, value in SETTINGS.items()]
        return ["pretrain", f"--data={spec.replace('CANARY', str(canary))}", f"--out={folder / 'out'}", *settings]

    return make


def _list(sandbox: Sandbox, folder: Path, canary: Path) -> list[str]:
    (folder / "list.txt").write_text(f"$(mkdir {canary})\n`mkdir {canary}`\n| mkdir {canary}\n")
    return _data(str(folder / "list.txt"))(sandbox, folder, canary)


def _postscript(sandbox: Sandbox, folder: Path, canary: Path) -> list[str]:
    """Write EPS with the suffix of an image, and a fake Ghostscript that creates the canary (see `tools_first`)."""
    images = shutil.copytree(sandbox.images, folder / "images")
    (images / "class0" / "page.jpg").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    )
    for name in ("gs", "gswin64c"):
        (folder / name).write_text(f"#!/bin/sh\nmkdir {canary}\n")
        (folder / name).chmod(0o755)
    settings = [f"--{name}={value}" for name, value in {**SETTINGS, "epochs": 2}.items()]
    return ["pretrain", f"--data={images}", f"--out={folder / 'out'}", "--workers=0", *settings]


def _tar(sandbox: Sandbox, folder: Path, canary: Path) -> list[str]:
    """Write a shard of valid images and of members with paths outside it, links, a pipe and pickles."""
    with tarfile.open(folder / "shard.tar", "w") as tar:
        for i in range(64):
            buffer = io.BytesIO()
            Image.fromarray(np.full((20, 20, 3), 3 * i, dtype=np.uint8)).save(buffer, "PNG")
            _member(tar, f"{i:03d}.png", buffer.getvalue())
        for name in (f"../{canary.name}", f"../../{canary.name}.png", str(canary), f"{canary}.jpg"):
            _member(tar, name, b"no image")
        _member(tar, "zzz.pkl", pickle.dumps(MaliciousPickle(canary)))
        _member(tar, "064.pyd", pickle.dumps(MaliciousPickle(canary)))
        _member(tar, "064.pth", pickle.dumps(MaliciousPickle(canary)))
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


def _manifest(name: str) -> Maker:
    """Write an otherwise valid manifest whose shard is a program or a file in another folder."""

    def make(sandbox: Sandbox, folder: Path, canary: Path) -> list[str]:
        shard = {"name": name.replace("CANARY", str(canary)), "bytes": 1024, "sha256": "0" * 64, "images": 64}
        index = {"name": "index.safetensors", "bytes": 8, "sha256": "0" * 64}
        content = {"schema": SHARDS_SCHEMA, "images": 64, "classes": None, "seed": None, "index": index}
        (folder / "shards.json").write_text(json.dumps({**content, "shards": [shard]}))
        return _data(str(folder / "shards.json"))(sandbox, folder, canary)

    return make


def _named_shard(folder: Path, canary: Path) -> str:
    name: str = json.loads((folder / "shards.json").read_text())["shards"][0]["name"]
    return name.removeprefix("pipe:")


_REFUSED = "is refused: it contains more than tensors"
_NO_YAML = "config.yaml is not a settings file .could not determine a constructor"
_NO_ADDRESS = "is not accepted; it must start with one of"
_WRONG_VALUES = "the saved description of .* has wrong values of {}"

PAYLOADS: dict[str, Payload] = {
    "pickle in a zip .pt": Payload(_pickled(torch.save, "w.pt"), _REFUSED, (_torch_load("w.pt"),)),
    "pickle nested in a state dict": Payload(
        _pickled(torch.save, "w.pth", lambda b: {"state_dict": {"a": torch.ones(1), "b": b}}),
        _REFUSED,
        (_torch_load("w.pth"),),
    ),
    "pickle in a legacy .pth": Payload(
        _pickled(_legacy, "w.pth", lambda b: {"model": {"x": [b]}}), _REFUSED, (_torch_load("w.pth"),)
    ),
    "bare pickle": Payload(_pickled(_raw, "w.pkl"), _REFUSED, (_pickle_load("w.pkl"),)),
    "pickle called .safetensors": Payload(
        _pickled(_raw, "w.safetensors"), "cannot read", (_pickle_load("w.safetensors"),)
    ),
    "pickle of a dict's key": Payload(
        _pickled(_raw, "w.pt", lambda b: {("k", 1): b}), _REFUSED, (_pickle_load("w.pt"),)
    ),
    "TorchScript": Payload(_script, "is refused: .*TorchScript", (_torch_load("w.pt"),)),
    "code in the description of safetensors": Payload(_described, "do not fit", (_evaluate_description,)),
    "config.yaml: python/object/apply": Payload(
        _config("\nx: !!python/object/apply:os.mkdir [CANARY]\n"), _NO_YAML, (_yaml_load,)
    ),
    "config.yaml: python/object/new": Payload(
        _config("\nx: !!python/object/new:os.mkdir {args: [CANARY]}\n"), _NO_YAML, (_yaml_load,)
    ),
    "config.yaml: python/name": Payload(
        _config("\nencoder: !!python/name:os.mkdir ''\n"), _NO_YAML, (_call_named_function,)
    ),
    "config.yaml: template text": Payload(
        _config("\nencoder: '${__import__(\"os\").mkdir(CANARY)}'\n"), "[Tt]here is no encoder", (_evaluate_template,)
    ),
    "config.yaml: encoder from a hub": Payload(
        _config("\nencoder: hf-hub:somebody/with-remote-code\n"), "[Tt]here is no encoder 'hf-hub:", ()
    ),
    "checkpoint: pickle as tensors": Payload(
        _checkpoint(module.TENSORS, lambda canary: pickle.dumps(MaliciousPickle(canary))),
        "is damaged and is not used",
        (_checkpoint_pickle(module.TENSORS),),
    ),
    "checkpoint: pickle as info": Payload(
        _checkpoint(module.INFO, lambda canary: pickle.dumps(MaliciousPickle(canary), protocol=0)),
        "is damaged and is not used",
        (_checkpoint_pickle(module.INFO),),
    ),
    "encoder: local-dir with a pickle": Payload(
        _encoder_config(architecture="local-dir:HUB"),
        _WRONG_VALUES.format("architecture"),
        (_torch_load("hub/pytorch_model.bin"),),
    ),
    "encoder: remote code": Payload(
        _encoder_config(architecture="hf-hub:somebody/with-remote-code"), _WRONG_VALUES.format("architecture"), ()
    ),
    "encoder: another library": Payload(
        _encoder_config(library="torch.hub", architecture="HUB"), _WRONG_VALUES.format(".*library"), (_hub_code,)
    ),
    "encoder: arguments that read files": Payload(
        _encoder_config(model_args={"pretrained": True, "checkpoint_path": "HUB/pytorch_model.bin"}),
        _WRONG_VALUES.format("model_args"),
        (_torch_load("hub/pytorch_model.bin"),),
    ),
    "embeddings of Python objects": Payload(
        _embeddings, "Object arrays cannot be loaded", (lambda f, canary: np.load(f / "f.npy", allow_pickle=True),)
    ),
    "data: pipe URL": Payload(
        _data("pipe:mkdir CANARY"), _NO_ADDRESS, (_shell(lambda folder, canary: f"mkdir {canary}"),)
    ),
    "data: pipe URL of shards": Payload(
        _data("pipe:mkdir CANARY; cat {000..003}.tar"),
        _NO_ADDRESS,
        (_shell(lambda folder, canary: f"mkdir {canary}; cat 000.tar"),),
    ),
    "data: shell in a name": Payload(
        _data("$(mkdir CANARY).tar"),
        "missing shards: 1 of 1",
        (_shell(lambda folder, canary: f"cat $(mkdir {canary}).tar"),),
    ),
    "data: file URL": Payload(_data("file:///etc/passwd"), "has no valid tar header", ()),
    "list file with shell commands": Payload(_list, "lists 3 missing files", (_listed(0), _listed(1), _listed(2))),
    "EPS under another name": Payload(_postscript, "Next: snclr", (_ghostscript,), code=0),
    "shard with ../, links, pickles": Payload(
        _tar,
        "Next: snclr",
        (
            _unpack(lambda canary: f"../{canary.name}"),
            _unpack(str),
            *map(_unpickle_member, ("zzz.pkl", "064.pyd", "064.pth")),
        ),
        code=0,
    ),
    "manifest of shards with a program": Payload(
        _manifest("pipe:mkdir CANARY"), "is not a plain file name", (_shell(_named_shard),)
    ),
    "manifest of shards in another folder": Payload(_manifest("../../../etc/passwd"), "is not a plain file name", ()),
}
"""Payloads without an unsafe way to open them name remote code or files in other folders.

Two are not refused (code 0): the run trains on the valid images beside them.
"""
