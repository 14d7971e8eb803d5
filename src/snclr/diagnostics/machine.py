"""The machine: versions, driver, GPUs, copies between them, shared memory."""

import itertools
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from snclr.data.workers import PREFETCH
from snclr.diagnostics.setup import CheckRow, Setup
from snclr.runtime.machine import cpu_name, versions
from snclr.train.build import view_sizes
from snclr.train.config import resolve

IMAGES_PER_RANK = 512
"""Most images per rank: those of the ImageNet recipes on eight GPUs. With fewer GPUs the batch has to be smaller."""


def check_machine(setup: Setup) -> Iterator[CheckRow]:
    """Describe software and hardware, and check what training needs of them."""
    yield CheckRow("versions", "measured", ", ".join(f"{name} {version}" for name, version in versions().items()))
    yield CheckRow("system", "measured", f"{platform.platform()}, {cpu_name()}, {torch.get_num_threads()} threads")
    yield driver_row(nvidia_driver(), torch.version.cuda, torch.cuda.is_available())
    if setup.kind == "cuda":
        yield from cuda_rows(setup)
    else:
        for name in ("GPU", "architecture", "bf16", "copies between GPUs"):
            yield CheckRow(name, "not applicable", f"the device is {setup.device}")
    yield shared_memory_row(setup)


def nvidia_driver() -> str | None:
    """Return the version of the NVIDIA driver, or None if the machine has none."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def driver_row(driver: str | None, built_for: str | None, available: bool) -> CheckRow:
    """Return whether torch can use the NVIDIA driver of the machine, if there is one.

    >>> driver_row("550.54", None, False).outcome
    'failed'
    """
    if driver is None and not available:
        return CheckRow("NVIDIA driver", "not applicable", "the machine has no NVIDIA driver")
    built = "without CUDA" if built_for is None else f"for CUDA {built_for}"
    return CheckRow.verdict(
        "NVIDIA driver", available, value=f"driver {driver or 'unknown'}, torch built {built}",
        limit="torch can use the GPU",
        advice="Install a build of torch for a CUDA version that the driver supports, or update the driver.",
    )  # fmt: skip


def cuda_rows(setup: Setup) -> Iterator[CheckRow]:
    """Describe each GPU, and check its architecture, bf16 and copies between GPUs."""
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        text = f"{found.name}, {found.total_memory / 1e9:.0f} GB, {found.multi_processor_count} multiprocessors"
        yield CheckRow(f"GPU {number}", "measured", text)
    major, minor = torch.cuda.get_device_capability(setup.device)
    compiled = torch.cuda.get_arch_list()
    supported = any(name in compiled for name in (f"sm_{major}{minor}", f"sm_{major}0", f"compute_{major}{minor}"))
    cudnn: Any = torch.backends.cudnn
    nccl: Any = torch.cuda.nccl
    libraries = f"cuDNN {cudnn.version()}, NCCL {'.'.join(map(str, nccl.version()))}"
    yield CheckRow.verdict(
        "architecture", supported, value=f"sm_{major}{minor}, {libraries}", limit=f"one of {', '.join(compiled)}",
        advice="This build of torch has no kernels for the GPU: install one that has.",
    )  # fmt: skip
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    yield CheckRow("bf16", "measured", "in hardware" if bf16 else "not in hardware: prefer --precision 16")
    yield peer_row(torch.cuda.device_count())


def peer_row(gpus: int) -> CheckRow:
    """Copy values between all pairs of GPUs and compare them: some machines corrupt direct copies."""
    if gpus < 2:
        return CheckRow("copies between GPUs", "not applicable", "there is one GPU")
    pairs = list(itertools.permutations(range(gpus), 2))
    direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    values = torch.arange(2**20)
    wrong = [f"{a} → {b}" for a, b in pairs if not torch.equal(values.to(f"cuda:{a}").to(f"cuda:{b}").cpu(), values)]
    return CheckRow.verdict(
        "copies between GPUs", not wrong,
        value=f"{direct} of {len(pairs)} pairs direct (P2P), {len(wrong)} wrong", limit="0 wrong",
        advice="Turn off the IOMMU (ACS) in the BIOS, or set NCCL_P2P_DISABLE=1.", details=tuple(wrong),
    )  # fmt: skip


def shared_memory_row(setup: Setup) -> CheckRow:
    """Check that /dev/shm can hold the batches that data workers of the recipe prepare ahead, on all ranks."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return CheckRow("shared memory", "not applicable", "the system has no /dev/shm")
    run = resolve({"recipe": setup.recipe, "data": "demo", "out": "unused"})
    images = min(run.batch_size // setup.ranks, IMAGES_PER_RANK)
    batch = images * sum(3 * size * size for size in view_sizes(run))
    needed = setup.ranks * run.workers * PREFETCH * batch
    free = shutil.disk_usage(folder).free
    return CheckRow.verdict(
        "shared memory", free >= needed, value=f"{free / 1e6:,.0f} MB free", number=free / 1e6,
        limit=f"≥ {needed / 1e6:,.0f} MB for recipe {setup.recipe}",
        advice="Start the container with a larger --shm-size (or --ipc=host), or lower --workers.",
    )  # fmt: skip
