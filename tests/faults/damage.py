"""Promises 8 and 14: a damaged checkpoint is never trained from; old runs open, unknown ones are refused untouched."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from snclr.train import checkpoint as module
from snclr.train.checkpoint import DamagedCheckpoint, UnknownSchema, latest_checkpoint, load_checkpoint
from snclr.train.state import digest
from tests.faults.harness import STEPS, Workshop, assert_same_end, last_step

GOLDEN = Path(__file__).parent / "golden"
KEPT = sorted(GOLDEN.glob("schema-*.zip"))
"""A run of every schema there has been."""
RESUMED = 20
"""Every so many trials a run is trained to its end after the damage; the rest only look for the newest checkpoint."""


def damaged(shop: Workshop, seed: int) -> None:
    """Cut, flip, lengthen or delete a file of the newest checkpoint: the one before is used, and it is said."""
    chance = random.Random(seed)
    out = shop.interrupted()
    good = sorted((out / "checkpoints").glob("step-*"))
    victim = chance.choice(sorted(good[-1].iterdir()))
    how = damage(victim, chance)
    said: list[str] = []
    found = latest_checkpoint(out / "checkpoints", said.append)
    assert found is not None, how
    assert found.path.name == good[-2].name, how
    assert digest(found.tensors, found.step) == digest(load_checkpoint(good[-2]).tensors, found.step)
    assert len(said) == 1, said
    assert str(good[-1]) in said[0], said
    assert "damaged" in said[0], said
    with pytest.raises(DamagedCheckpoint):
        load_checkpoint(good[-1])
    if seed % RESUMED == 0:
        printed = shop.pretrain(out, "--resume", "--keep-checkpoints=3").ends_with(0)
        assert f"warning: the checkpoint {good[-1]} is damaged" in printed, printed
        assert_same_end(out, shop.undisturbed())
    shutil.rmtree(out)


def damage(path: Path, chance: random.Random) -> str:
    """Change a file in one way of many; what was done, in words."""
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    kind = chance.choice(("cut", "bit", "byte", "zeros", "longer", "empty", "deleted", "folder", "swapped"))
    if kind in ("deleted", "folder"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
        return f"{path.name}: {kind}"
    if kind == "cut":
        del content[place:]
    elif kind == "bit":
        content[place] ^= 1 << chance.randrange(8)
    elif kind == "byte":
        content[place] = (content[place] + 1 + chance.randrange(255)) % 256
    elif kind == "zeros":
        end = min(len(content), place + 4096)
        content[place:end] = b"\xff" * (end - place) if not any(content[place:end]) else bytes(end - place)
    elif kind == "longer":
        content += b"\0"
    elif kind == "swapped":
        content = bytearray(path.with_name("info.json" if path.name != "info.json" else "manifest.json").read_bytes())
    else:
        content.clear()
    path.write_bytes(content)
    return f"{path.name}: {kind} at {place}"


def golden(shop: Workshop, seed: int) -> None:
    """A run folder kept from some schema opens with its own numbers, and goes on (even seeds) or is evaluated."""
    out = shop.place("golden")
    shutil.unpack_archive(KEPT[seed // 2 % len(KEPT)], out)
    expected = json.loads((out / "expected.json").read_text())
    (out / "expected.json").unlink()
    found = latest_checkpoint(out / "checkpoints", warn=_fail)
    assert found is not None
    assert found.step == expected["step"]
    assert digest(found.tensors, found.step) == expected["digest"]
    if seed % 2 == 0:
        command = ("pretrain", "--resume", f"--out={out}", f"--data={shop.images}")
        printed = shop.snclr(*command, out=out).ends_with(0)
        assert f"resuming after step {found.step}" in printed, printed
        assert last_step(out) == STEPS
        shop.snclr("knn", out, "--k=5", "--device=cpu").ends_with(0)
    else:
        image, figure = next(shop.images.rglob("0.png")), out / "neighbours.png"
        command = ("neighbors", str(out), str(image), "--candidates=queue", "--device=cpu", f"--out={figure}")
        shop.snclr(*command).ends_with(0)
        rows = json.loads(figure.with_suffix(".json").read_text())["rows"]
        queued = set(found.tensors["method/criterion.queue.ids"].tolist())
        assert {entry["index"] for row in rows for entry in row["neighbors"]} <= queued, rows
    shutil.rmtree(out)


def unknown_schema(shop: Workshop, seed: int) -> None:
    """A checkpoint of a newer program is refused, for training and for evaluation, and nothing is written.

    So is an encoder of one, which is what most evaluations read.
    """
    out = shop.interrupted()
    newest = sorted((out / "checkpoints").glob("step-*"))[-1]
    manifest = json.loads((newest / module.MANIFEST).read_bytes())
    del manifest["manifest_sha256"]
    schema = (module.SCHEMA + 1 + seed, 0, -1)[seed % 3]
    (newest / module.MANIFEST).write_bytes(module._manifest_bytes({**manifest, "schema": schema}))
    with pytest.raises(UnknownSchema):
        load_checkpoint(newest)
    refusal = f"has schema {schema}; this version of snclr reads schema {module.SCHEMA}"
    _refused(shop, out, refusal, "pretrain", "--resume", f"--out={out}")
    _refused(shop, out, refusal, "neighbors", str(out), "--device=cpu")
    shutil.rmtree(out)
    run = shutil.copytree(shop.undisturbed(), shop.place("copy"))
    _rewrite_description(run, schema)
    _refused(shop, run, f"has format {schema}; this version reads", "knn", str(run), "--device=cpu")
    shutil.rmtree(run)


def _refused(shop: Workshop, run: Path, refusal: str, *command: str) -> None:
    before = _contents(run)
    printed = shop.snclr(*command).ends_with(2)
    assert refusal in printed, printed
    assert "Traceback" not in printed, printed
    assert _contents(run) == before, command


def _rewrite_description(run: Path, schema: int) -> None:
    """Give the encoder of a run, in both its files, another schema."""
    config = json.loads((run / "config.json").read_text())
    config["snclr"]["schema"] = schema
    (run / "config.json").write_text(json.dumps(config))
    weights = run / "encoder.safetensors"
    save_file(load_file(weights), weights, {"snclr": json.dumps(config["snclr"])})


def write_golden(shop: Workshop) -> Path:
    """Write the golden run of the current schema, a tiny run that was killed. To be done once for each schema."""
    archive = GOLDEN / f"schema-{module.SCHEMA}.zip"
    assert not archive.exists(), f"{archive} is there: a golden run is never written again"
    out, place = shop.place("golden"), shop.place("golden")
    fault = {"name": "kill_at", "point": "before fsync", "nth": 3}
    shop.pretrain(out, "--hidden=8", "--dim=4", "--queue-length=16", "--optimizer=sgd", faults=[fault]).wait()
    found = latest_checkpoint(out / "checkpoints", warn=_fail)
    assert found is not None
    place.mkdir()
    config = (out / "config.yaml").read_text().replace(str(shop.images), "images").replace(str(out), "run")
    (place / "config.yaml").write_text(config)
    shutil.copy(out / "metrics.jsonl", place)
    tensors = {name: _patterned(name, value) for name, value in found.tensors.items()}
    module.save_checkpoint(place / "checkpoints", tensors, found.info, step=found.step)
    (place / "checkpoints" / ".lock").unlink()
    facts = {"step": found.step, "digest": digest(tensors, found.step)}
    (place / "expected.json").write_text(json.dumps(facts, indent=1) + "\n")
    GOLDEN.mkdir(exist_ok=True)
    return Path(shutil.make_archive(str(archive.with_suffix("")), "zip", place))


def _patterned(name: str, value: torch.Tensor) -> torch.Tensor:
    """Weights that a zip makes small: the names, types and shapes are what counts in a golden run."""
    if not value.is_floating_point() or value.ndim == 0 or "queue" in name:
        return value
    if name.endswith("running_var"):
        return torch.ones_like(value)
    return ((torch.arange(value.numel()) * 5 % 7 - 3) / 32).to(value.dtype).reshape(value.shape)


def _contents(folder: Path) -> dict[str, str]:
    """Hashes of all files that a run is made of; its log and lock may say that someone was here, rubbish may go."""
    told = ("train.log", ".snclr-run.lock")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in told)
    files = [path for path in files if ".partial" not in path.parent.name]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _fail(text: str) -> None:
    raise AssertionError(text)
