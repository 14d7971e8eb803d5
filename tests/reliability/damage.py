"""Promises 8 and 14: damaged checkpoints are skipped, old runs open, and unknown schemas are refused."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from snclr.checkpoint import format as module
from snclr.checkpoint.format import DamagedCheckpoint, UnknownSchema, latest_checkpoint, load_checkpoint
from tests.helpers.state_digest import digest
from tests.reliability.harness import STEPS, Sandbox, assert_same_result, last_step

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_RUNS = sorted(GOLDEN.glob("schema-*.zip"))
"""A run of every schema."""
RESUME_EVERY = 20
"""Every so many trials the damaged run is resumed; the other trials only load the newest checkpoint."""


def damaged(sandbox: Sandbox, seed: int) -> None:
    """Damage a file of the newest checkpoint: the previous one is used, with a warning."""
    chance = random.Random(seed)
    out = sandbox.killed_run()
    good = sorted((out / "checkpoints").glob("step-*"))
    victim = chance.choice(sorted(good[-1].iterdir()))
    how = damage(victim, chance)
    warnings: list[str] = []
    found = latest_checkpoint(out / "checkpoints", warnings.append)
    assert found is not None, how
    assert found.path.name == good[-2].name, how
    assert digest(found.tensors, found.step) == digest(load_checkpoint(good[-2]).tensors, found.step)
    assert len(warnings) == 1, warnings
    assert str(good[-1]) in warnings[0], warnings
    assert "damaged" in warnings[0], warnings
    with pytest.raises(DamagedCheckpoint):
        load_checkpoint(good[-1])
    if seed % RESUME_EVERY == 0:
        printed = sandbox.pretrain(out, "--resume", "--keep-checkpoints=3").expect_exit(0)
        assert f"warning: the checkpoint {good[-1]} is damaged" in printed, printed
        assert_same_result(out, sandbox.reference_run())
    shutil.rmtree(out)


def damage(path: Path, chance: random.Random) -> str:
    """Damage a file in a random way and return a description."""
    content = bytearray(path.read_bytes())
    offset = chance.randrange(len(content))
    kind = chance.choice(("cut", "bit", "byte", "zeros", "longer", "empty", "deleted", "folder", "swapped"))
    if kind in ("deleted", "folder"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
        return f"{path.name}: {kind}"
    if kind == "cut":
        del content[offset:]
    elif kind == "bit":
        content[offset] ^= 1 << chance.randrange(8)
    elif kind == "byte":
        content[offset] = (content[offset] + 1 + chance.randrange(255)) % 256
    elif kind == "zeros":
        end = min(len(content), offset + 4096)
        content[offset:end] = b"\xff" * (end - offset) if not any(content[offset:end]) else bytes(end - offset)
    elif kind == "longer":
        content += b"\0"
    elif kind == "swapped":
        content = bytearray(path.with_name("info.json" if path.name != "info.json" else "manifest.json").read_bytes())
    else:
        content.clear()
    path.write_bytes(content)
    return f"{path.name}: {kind} at {offset}"


def golden(sandbox: Sandbox, seed: int) -> None:
    """Open a golden run; it has the expected tensors and is resumed (even seeds) or evaluated."""
    out = sandbox.new_path("golden")
    shutil.unpack_archive(GOLDEN_RUNS[seed // 2 % len(GOLDEN_RUNS)], out)
    expected = json.loads((out / "expected.json").read_text())
    (out / "expected.json").unlink()
    found = latest_checkpoint(out / "checkpoints", warn=_fail)
    assert found is not None
    assert found.step == expected["step"]
    assert digest(found.tensors, found.step) == expected["digest"]
    if seed % 2 == 0:
        command = ("pretrain", "--resume", f"--out={out}", f"--data={sandbox.images}")
        printed = sandbox.snclr(*command, out=out).expect_exit(0)
        assert f"resuming after step {found.step}" in printed, printed
        assert last_step(out) == STEPS
        sandbox.snclr("knn", out, "--k=5", "--device=cpu").expect_exit(0)
    else:
        image, figure = next(sandbox.images.rglob("0.png")), out / "neighbors.png"
        command = ("neighbors", str(out), str(image), "--candidates=queue", "--device=cpu", f"--out={figure}")
        sandbox.snclr(*command).expect_exit(0)
        rows = json.loads(figure.with_suffix(".json").read_text())["rows"]
        queued = set(found.tensors["method/criterion.queue.ids"].tolist())
        assert {entry["index"] for row in rows for entry in row["neighbors"]} <= queued, rows
    shutil.rmtree(out)


def unknown_schema(sandbox: Sandbox, seed: int) -> None:
    """Refuse a checkpoint or an encoder file of an unknown schema, and write nothing."""
    out = sandbox.killed_run()
    newest = sorted((out / "checkpoints").glob("step-*"))[-1]
    manifest = json.loads((newest / module.MANIFEST).read_bytes())
    del manifest["manifest_sha256"]
    schema = (module.SCHEMA + 1 + seed, 0, -1)[seed % 3]
    (newest / module.MANIFEST).write_bytes(module._manifest_bytes({**manifest, "schema": schema}))
    with pytest.raises(UnknownSchema):
        load_checkpoint(newest)
    refusal = f"has schema {schema}, but this version of snclr reads {module.SCHEMA}"
    _refused(sandbox, out, refusal, "pretrain", "--resume", f"--out={out}")
    _refused(sandbox, out, refusal, "neighbors", str(out), "--device=cpu")
    shutil.rmtree(out)
    run = shutil.copytree(sandbox.reference_run(), sandbox.new_path("copy"))
    _rewrite_description(run, schema)
    _refused(sandbox, run, f"has schema {schema}, but this version of snclr reads", "knn", str(run), "--device=cpu")
    shutil.rmtree(run)


def _refused(sandbox: Sandbox, run: Path, refusal: str, *command: str) -> None:
    before = _contents(run)
    printed = sandbox.snclr(*command).expect_exit(2)
    assert refusal in printed, printed
    assert "Traceback" not in printed, printed
    assert _contents(run) == before, command


def _rewrite_description(run: Path, schema: int) -> None:
    """Change the schema in both encoder files of a run."""
    config = json.loads((run / "config.json").read_text())
    config["snclr"]["schema"] = schema
    (run / "config.json").write_text(json.dumps(config))
    weights = run / "encoder.safetensors"
    save_file(load_file(weights), weights, {"snclr": json.dumps(config["snclr"])})


def write_golden(sandbox: Sandbox) -> Path:
    """Write the golden run of the current schema, a tiny run that was killed. Call it once per schema."""
    archive = GOLDEN / f"schema-{module.SCHEMA}.zip"
    assert not archive.exists(), f"{archive} exists: a golden run is never written again"
    out, folder = sandbox.new_path("golden"), sandbox.new_path("golden")
    fault = {"name": "kill_at", "point": "before fsync", "nth": 3}
    sandbox.pretrain(out, "--hidden=8", "--dim=4", "--queue-length=16", "--optimizer=sgd", faults=[fault]).wait()
    found = latest_checkpoint(out / "checkpoints", warn=_fail)
    assert found is not None
    folder.mkdir()
    config = (out / "config.yaml").read_text().replace(str(sandbox.images), "images").replace(str(out), "run")
    (folder / "config.yaml").write_text(config)
    shutil.copy(out / "metrics.jsonl", folder)
    tensors = {name: _patterned(name, value) for name, value in found.tensors.items()}
    module.save_checkpoint(folder / "checkpoints", tensors, found.info, step=found.step)
    (folder / "checkpoints" / ".lock").unlink()
    facts = {"step": found.step, "digest": digest(tensors, found.step)}
    (folder / "expected.json").write_text(json.dumps(facts, indent=1) + "\n")
    GOLDEN.mkdir(exist_ok=True)
    return Path(shutil.make_archive(str(archive.with_suffix("")), "zip", folder))


def _patterned(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return weights that compress well: only names, dtypes and shapes matter in a golden run."""
    if not value.is_floating_point() or value.ndim == 0 or "queue" in name:
        return value
    if name.endswith("running_var"):
        return torch.ones_like(value)
    return ((torch.arange(value.numel()) * 5 % 7 - 3) / 32).to(value.dtype).reshape(value.shape)


def _contents(folder: Path) -> dict[str, str]:
    """Hash all files of a run except the log, the sessions, the lock and partial files, which may change."""
    ignored = ("train.log", "sessions.jsonl", ".snclr-run.lock")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in ignored)
    files = [path for path in files if ".partial" not in path.parent.name]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _fail(text: str) -> None:
    raise AssertionError(text)
