"""Run the checks one after another; an error in a check is a failed row."""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from snclr.diagnostics.kernels import check_kernels
from snclr.diagnostics.machine import check_machine
from snclr.diagnostics.methods import check_host_waits, check_methods, check_overflow
from snclr.diagnostics.recipe import check_compile, check_memory, check_speed
from snclr.diagnostics.runs import check_ranks, check_resume
from snclr.diagnostics.setup import CheckRow, Setup
from snclr.distributed.environment import ranks_per_node
from snclr.errors import UserError, did_you_mean, first_line
from snclr.recipes import get_recipe
from snclr.runtime.device import pick_device
from snclr.runtime.progress import set_status
from snclr.runtime.settings import check_devices

CHECKS: dict[str, Callable[[Setup], Iterator[CheckRow]]] = {
    "machine": check_machine, "kernels": check_kernels, "methods": check_methods, "overflow": check_overflow,
    "host waits": check_host_waits, "resume": check_resume, "ranks": check_ranks, "memory": check_memory,
    "speed": check_speed, "compile": check_compile,
}  # fmt: skip
"""The groups of checks by name, in the order in which they run."""
ERROR_ADVICE = "The check could not run. If the message does not help, please report it with the output of --json."


@dataclass(frozen=True)
class DoctorResult:
    """All rows, in the order of the checks."""

    device: str
    rows: tuple[CheckRow, ...]
    group_seconds: dict[str, float]
    """Seconds that each group of checks took."""

    @property
    def seconds(self) -> float:
        """Seconds of all checks."""
        return sum(self.group_seconds.values())

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows by outcome."""
        return dict(Counter(row.outcome for row in self.rows))

    @property
    def failed(self) -> list[CheckRow]:
        """The rows that failed."""
        return [row for row in self.rows if row.outcome == "failed"]

    @property
    def exit_code(self) -> int:
        """1 if a check failed, else 0."""
        return 1 if self.failed else 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "seconds": self.seconds, "counts": self.counts, "exit_code": self.exit_code}


def diagnose(device: str, devices: str, recipe: str | None, only: Sequence[str], *, quick: bool) -> DoctorResult:
    """Run the groups of checks in `only`, by default all, on one device and on several ranks."""
    for name in only:
        if name not in CHECKS:
            raise UserError(f"there is no check {name!r}{did_you_mean(name, CHECKS)}; choose from {', '.join(CHECKS)}")
    device = pick_device(device)
    kind = device.partition(":")[0]
    recipe = recipe or ("resnet50-imagenet" if kind == "cuda" else "demo")
    get_recipe(recipe)
    rows: list[CheckRow] = []
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="snclr-doctor-") as folder:
        setup = Setup(device, count_ranks(kind, devices), recipe, quick, Path(folder))
        for group in only or CHECKS:
            set_status(f"checking {group}")
            start = time.monotonic()
            rows += run_group(group, setup)
            seconds[group] = time.monotonic() - start
    return DoctorResult(device, tuple(rows), seconds)


def run_group(group: str, setup: Setup) -> list[CheckRow]:
    """Return the rows of a group; an error ends it with a failed row."""
    rows: list[CheckRow] = []
    try:
        rows.extend(CHECKS[group](setup))
    except Exception as error:
        value = f"{type(error).__name__}: {first_line(error)}"
        rows.append(CheckRow.verdict("error", False, value=value, limit="no error", advice=ERROR_ADVICE))
    return [replace(row, group=group) for row in rows]


def count_ranks(kind: str, devices: str) -> int:
    """Return the ranks that the check "ranks" compares with one; auto: every GPU, or two on a CPU."""
    check_devices(devices)
    ranks = 2 if (kind, devices) == ("cpu", "auto") else ranks_per_node(kind, devices)
    if kind == "cuda" and ranks > (gpus := torch.cuda.device_count()):
        raise UserError(f"devices is {devices}, but this machine has {gpus} GPUs. Give at most {gpus}.")
    return ranks
