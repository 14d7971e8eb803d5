"""Train and evaluate one run in its own process: `python -m snclr.studies.worker JOB.json`.

A separate process gives the run its own timings and peak memory, and isolates crashes.
"""

import json
import os
import signal
import sys
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from snclr.checkpoint.encoder_file import save_encoder
from snclr.checkpoint.run_dir import RunDir
from snclr.distributed.collectives import rank_and_size
from snclr.errors import UserError
from snclr.io.atomic import discard, remove_leftovers
from snclr.io.jsonl import append_jsonl, read_jsonl
from snclr.runtime.device import pick_device
from snclr.runtime.machine import cpu_name, versions
from snclr.runtime.progress import is_first_rank
from snclr.runtime.stop import StopRequested
from snclr.studies.conditions import images_seen_per_step
from snclr.studies.measures import evaluate
from snclr.studies.records import SCHEMA, downsample_metrics, write_record
from snclr.studies.runs import UNTRAINED
from snclr.train.build import build_method, encoder_spec
from snclr.train.config import resolve
from snclr.train.metrics import read_metrics
from snclr.train.planning.cost import WARMUP_STEPS, measure_cost, peak_memory
from snclr.train.pretrain import pretrain


def main(argv: list[str]) -> int:
    """Run the job of a file; return 0, 2 for bad input, 130 or 143 for a stop."""
    _stop_when_stdin_closes()
    try:
        return run_job(json.loads(Path(argv[0]).read_text(encoding="utf-8")))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except StopRequested as request:  # in an evaluation, which the next start continues
        return request.exit_code
    except KeyboardInterrupt:
        return 130


def run_job(job: dict[str, Any]) -> int:
    """Train or resume, evaluate, and write the record last: a run with a record is finished."""
    started, evaluation = datetime.now(timezone.utc), job["evaluation"]
    measured: dict[str, Any]
    if evaluation["kind"] == "cost":
        cost = measure_cost(job["given"], steps=evaluation["steps"])
        protocol = f"median of {evaluation['steps']} steps after {WARMUP_STEPS} warm-up steps; full queue, no data wait"
        numbers = {"seconds_per_step": cost.pop("seconds_per_step")}
        measured = {"numbers": numbers, "protocols": {"cost": protocol}, "cost": cost}
    elif evaluation["untrained"]:
        _write_untrained(job)
        measured = {**evaluate(job), "cost": {**_NO_COST, **peak_memory()}, "last": {}, "series": {}}
    else:
        stopped = _train(job)
        if stopped:
            return stopped
        lines = read_metrics(job["folder"])
        last = {name: value for name, value in lines[-1].items() if name != "timing"} if lines else {}
        measured = {**evaluate(job), "cost": _cost_of(job), "last": last, "series": downsample_metrics(lines)}
    if rank_and_size()[0] == 0:
        # Records have no local paths.
        names = {name: Path(evaluation[name]).name for name in ("data", "test", "coco") if evaluation[name]}
        record = {
            "schema": SCHEMA, "key": job["key"], "settings": job["settings"], "data": job["data"],
            "evaluation": {**evaluation, **names}, **measured, "where": _environment(job),
            "versions": versions(), "time": started.isoformat(timespec="seconds"),
        }  # fmt: skip
        checkpoints = RunDir(job["folder"]).checkpoints
        if not job["keep_runs"]:
            if checkpoints.is_dir():
                discard(checkpoints)
            remove_leftovers(checkpoints)  # the rest of an interrupted deletion
        write_record(record, Path(job["record"]))
    return 0


_NO_COST: dict[str, Any] = {
    "seconds": 0.0, "cpu_seconds": 0.0, "steps": 0, "images": 0, "skipped": 0, "attempts": 1
}  # fmt: skip


def _write_untrained(job: dict[str, Any]) -> None:
    """Write the encoder with the weights that a run of this seed starts from."""
    config = resolve(job["given"])
    spec = encoder_spec(config)
    if rank_and_size()[0] == 0 and not RunDir(job["folder"]).encoder_weights.is_file():
        encoder = build_method(config, spec).encoder
        save_encoder(encoder, spec, Path(job["folder"]), extra={"method": UNTRAINED, "seed": config.seed})


def _train(job: dict[str, Any]) -> int:
    """Train the run to completion; return 0 or the exit code of a stop. A complete run is not trained again."""
    run, attempts = RunDir(job["folder"]), Path(job["attempts"])
    first = is_first_rank()  # others would take rank 0's entry for a killed attempt
    if first:
        _close_killed_attempt(attempts, run)
    if run.encoder_weights.is_file() and any(line.get("complete") for line in read_jsonl(attempts)):
        return 0
    started, cpu = time.time(), time.process_time()
    if first:
        append_jsonl(attempts, {"started": started, "pid": os.getpid()})
    skipped, code = 0, 0
    try:
        # `resume` starts the run if there is none.
        result = pretrain(**job["given"], out=job["folder"], resume=True, quiet=True)
        steps, skipped = result.step, result.skipped
    except StopRequested as request:
        steps, code = request.step or 0, request.exit_code
    if rank_and_size()[0] == 0:
        spent = {"seconds": time.time() - started, "cpu_seconds": time.process_time() - cpu, **peak_memory()}
        append_jsonl(attempts, {**spent, "steps": steps, "skipped": skipped, "complete": code == 0})
    return code


def _close_killed_attempt(attempts: Path, run: RunDir) -> None:
    """Close the entry of a killed attempt; its time counts up to its last checkpoint."""
    lines = read_jsonl(attempts)
    if not lines or "started" not in lines[-1]:
        return
    saved = [path.stat().st_mtime for path in run.checkpoints.glob("step-*")]
    append_jsonl(attempts, {"seconds": max(0.0, max(saved, default=0.0) - lines[-1]["started"]), "killed": True})


def _cost_of(job: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds summed over all attempts, and their highest peak memory."""
    ends = [line for line in read_jsonl(Path(job["attempts"])) if "seconds" in line]
    last = next(line for line in reversed(ends) if line.get("complete"))
    whole = all("cpu_seconds" in line for line in ends)
    return {
        "seconds": round(sum(line["seconds"] for line in ends), 2),
        "cpu_seconds": round(sum(line["cpu_seconds"] for line in ends), 2) if whole else None,
        "peak_mb": max(line["peak_mb"] for line in ends if "peak_mb" in line),
        **{name: last[name] for name in ("memory", "steps", "skipped")},
        "images": round(last["steps"] * images_seen_per_step(job["given"])),
        "attempts": len(ends),
    }


def _environment(job: dict[str, Any]) -> dict[str, Any]:
    """Describe the hardware and settings that the timings depend on."""
    config = resolve(job["given"])
    return {
        "accelerator": pick_device(config.device).partition(":")[0],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name(),
        "cores": os.cpu_count(),
        "threads": config.threads or torch.get_num_threads(),
        "workers": config.workers,
        "processes": config.devices,
        **({"compile": True} if config.compile else {}),
        "jobs": job["jobs"],
    }


def _stop_when_stdin_closes() -> None:
    """Send SIGTERM to this process when standard input closes: the study that started it holds the other end."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="snclr-parent").start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
