"""One run in its own process: `python -m snclr.comparison.worker JOB.json`. It trains, measures, and writes a record.

A process of its own, so that seconds and peak memory are this run's alone, and a crash takes no other run with it.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from snclr.comparison.store import SCHEMA, Records, thinned
from snclr.durable import discard, sweep
from snclr.errors import UserError
from snclr.train.run_folder import RunFolder

VALIDATION = 0.1
"""The share of each training class that a tuned setting is chosen on."""


def main(argv: list[str]) -> int:
    """Do the job in the file; the exit code is pretrain's: 0, 2 for bad input, 130 or 143 for a stop."""
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line does
    _stop_with_parent()
    try:
        return run_job(json.loads(Path(argv[0]).read_text(encoding="utf-8")))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def run_job(job: dict[str, Any]) -> int:
    """Train (or go on training), measure, and write the record last: what has a record is finished."""
    from snclr.distributed import rank_and_size

    began = datetime.now(timezone.utc)
    facts: dict[str, Any]
    if job["evaluation"]["kind"] == "cost":
        from snclr.comparison.cost import measure_cost

        facts = measure_cost(job["given"], steps=job["evaluation"]["steps"])
    else:
        stopped = _train(job)
        if stopped:
            return stopped
        facts = {**_measure(job), "cost": _cost_of(job), **_course(job["folder"])}
    if rank_and_size()[0] == 0:
        record = {
            "schema": SCHEMA, "key": job["key"], "settings": job["settings"], "data": job["data"],
            "evaluation": _without_places(job["evaluation"]), **facts, "where": _where(job), "versions": _versions(),
            "time": began.isoformat(timespec="seconds"),
        }  # fmt: skip
        if not job["keep_runs"]:
            _clear(RunFolder(job["folder"]).checkpoints)
        Records(Path(job["record"]).parent.parent).write(record, Path(job["record"]))
    return 0


def _clear(checkpoints: Path) -> None:
    """Delete them, and what a kill in an earlier deletion left of them."""
    if checkpoints.is_dir():
        discard(checkpoints)
    sweep(checkpoints)


# ---- training, and what it cost


def _train(job: dict[str, Any]) -> int:
    """Train the run to its end; 0, or the exit code of a stop. A run that is complete is left as it is."""
    from snclr.distributed import rank_and_size
    from snclr.train.pretrain import pretrain

    run, attempts = RunFolder(job["folder"]), Path(job["attempts"])
    first = _starts_first()
    if first:
        _close_lost(attempts, run)
    if run.encoder_weights.is_file() and any(line.get("complete") for line in _lines(attempts)):
        return 0
    began, cpu = time.time(), time.process_time()
    if first:
        _append(attempts, {"started": began, "pid": os.getpid()})
    result = pretrain(**job["given"], out=job["folder"], resume=True, quiet=True)
    if rank_and_size()[0] == 0:
        spent = {"seconds": time.time() - began, "cpu_seconds": time.process_time() - cpu, **peak_memory()}
        _append(attempts, {**spent, "steps": result.step, "skipped": result.skipped, "complete": result.complete})
    return result.exit_code if not result.complete else 0


def _starts_first() -> bool:
    """Whether this is process 0 or the only one, by what launchers say: asked before the processes have met.

    The others must not touch the record of attempts: they would take process 0's for one that was killed.
    """
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"))


def _close_lost(attempts: Path, run: RunFolder) -> None:
    """End an attempt that was killed: what it did up to its last checkpoint counts, the rest is done again."""
    lines = _lines(attempts)
    if not lines or "started" not in lines[-1]:
        return
    saved = [path.stat().st_mtime for path in run.checkpoints.glob("step-*")]
    _append(attempts, {"seconds": max(0.0, max(saved, default=0.0) - lines[-1]["started"]), "killed": True})


def _cost_of(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds over all attempts, and the highest peak of memory among them."""
    ends = [line for line in _lines(Path(job["attempts"])) if "seconds" in line]
    last = next(line for line in reversed(ends) if line.get("complete"))
    whole = all("cpu_seconds" in line for line in ends)
    return {
        "seconds": round(sum(line["seconds"] for line in ends), 2),
        "cpu_seconds": round(sum(line["cpu_seconds"] for line in ends), 2) if whole else None,
        "peak_mb": max(line["peak_mb"] for line in ends if "peak_mb" in line),
        "memory": last["memory"],
        "steps": last["steps"],
        "skipped": last["skipped"],
        "attempts": len(ends),
    }


def peak_memory() -> dict[str, Any]:
    """The most memory this process had at once, in MB (10⁶ bytes): on a GPU torch's tensors, else the whole process.

    Loader processes are not part of it.
    """
    import torch

    if torch.cuda.is_available() and torch.cuda.max_memory_allocated() > 0:
        return {"peak_mb": round(torch.cuda.max_memory_allocated() / 1e6, 1), "memory": "cuda"}
    try:
        # Not ru_maxrss where it can be had otherwise: that one starts at the size of the process that started us.
        status = Path("/proc/self/status").read_text()
        kilobytes = int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError, ValueError):
        import resource

        found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        kilobytes = found // 1024 if sys.platform == "darwin" else found
    return {"peak_mb": round(kilobytes * 1024 / 1e6, 1), "memory": "process"}


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


# ---- measuring


def _measure(job: dict[str, Any]) -> dict[str, Any]:
    """kNN and linear accuracy on one set of features; to choose a setting kNN alone, on a part of the training set."""
    from snclr.data.splits import hold_out, open_splits, take
    from snclr.devices import pick_device
    from snclr.evaluate.features import extract_features
    from snclr.evaluate.knn import knn
    from snclr.evaluate.linear import linear_cached
    from snclr.evaluate.scoring import match_labels
    from snclr.export.encoder import load_encoder

    how, given = job["evaluation"], job["given"]
    data = how["data"] or given["data"]
    train, test, words = open_splits(data, how["test"])
    for path in filter(None, (data, how["test"])):
        words = words.replace(path, Path(path).name)  # records travel: no folders of this machine
    if how["kind"] == "validation":
        train_labels, _, _ = match_labels(train, train)
        kept, held = hold_out(train_labels, VALIDATION, seed=0)
        train, test = take(train, kept), take(train, held)
        words += f", {VALIDATION:.0%} of each training class held out to choose settings; the test part is not used"
    encoder, spec = load_encoder(Path(job["folder"]))
    train_labels, test_labels, _ = match_labels(train, test)
    common: dict[str, Any] = {
        "image_size": spec.image_size, "workers": 0, "quiet": True,
        "device": pick_device(given.get("accelerator", "auto")),
    }  # fmt: skip
    a = extract_features(encoder, train, labels=train_labels, **common)
    b = extract_features(encoder, test, labels=test_labels, **common)
    sets = (a.features, a.labels, b.features, b.labels)
    results = {"knn": knn(*sets, k=how["k"], temperature=how["temperature"], data=words)}
    if how["kind"] == "test":
        results |= {"linear": linear_cached(*sets, data=words)}  # type: ignore[dict-item]
    return _kept(job["folder"], results)


def _kept(folder: str, results: dict[str, Any]) -> dict[str, Any]:
    """The numbers with their protocols, for the record; the run's results.jsonl gets them too."""
    from snclr.distributed import rank_and_size
    from snclr.evaluate.results import append_result

    for name, result in results.items() if rank_and_size()[0] == 0 else ():
        kind = "linear-cached" if name == "linear" else name
        append_result(folder, kind, {"top1": result.top1, "top5": result.top5}, result.protocol)
    tops = {name: result.top1 for name, result in results.items()}
    tops |= {f"{name}_top5": result.top5 for name, result in results.items() if result.top5 is not None}
    return {"numbers": tops, "protocols": {name: result.protocol for name, result in results.items()}}


def _course(folder: str) -> dict[str, Any]:
    """How the training went: the last values, and a thinned series of each."""
    from snclr.train.metrics import read_metrics

    lines = read_metrics(folder)
    last = {name: value for name, value in lines[-1].items() if name != "timing"} if lines else {}
    return {"last": last, "series": thinned(lines)}


# ---- facts


def _without_places(evaluation: dict[str, Any]) -> dict[str, Any]:
    """The evaluation with the names of its data, not where they lie on this machine."""
    return {**evaluation, **{n: Path(evaluation[n]).name for n in ("data", "test") if evaluation[n]}}


def _where(job: dict[str, Any]) -> dict[str, Any]:
    """What the seconds depend on."""
    import torch

    from snclr.config import resolve

    config = resolve(job["given"])
    return {
        "accelerator": "cuda" if torch.cuda.is_available() and config.accelerator in ("auto", "cuda") else "cpu",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        "cores": os.cpu_count(),
        "threads": config.threads or torch.get_num_threads(),
        "workers": config.workers,
        "processes": config.devices,
        **({"compile": True} if config.compile else {}),
        "jobs": job["jobs"],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    import snclr

    others = {name: version(name) for name in ("torch", "torchvision", "timm", "numpy", "pillow")}
    return {"snclr": snclr.__version__, "python": platform.python_version(), **others}


def _stop_with_parent() -> None:
    """When the process that started us is gone, its end of our standard input closes: save and stop then."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="snclr-parent").start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
