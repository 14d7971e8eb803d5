"""Hardware and versions, for the records of runs and studies; without torch."""

import platform
import re
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

from snclr import __version__
from snclr.errors import UserError

_GPU_FILES = ("nvidia*", "nvhost*", "nvmap", "kfd", "dxg")
"""Device files of the drivers of CUDA (also on Jetson boards and under WSL) and ROCm."""


def cpu_name() -> str:
    """Return the model of the processor."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return model[1] if model else platform.processor() or platform.machine()


def has_gpu_driver() -> bool:
    """Return False if this machine cannot have a GPU that torch uses: Linux without a device file of a driver."""
    return sys.platform != "linux" or any(any(Path("/dev").glob(name)) for name in _GPU_FILES)


def check_precision(device: str, precision: str) -> None:
    """Raise UserError if the device is the CPU and does not support the precision."""
    precision = precision.removesuffix("-mixed")
    if device.startswith("cpu") and precision in ("16", "bf16"):
        raise UserError(
            f"precision {precision} is not supported on CPUs: most lack it and some crash. Give --precision 32."
        )


def versions() -> dict[str, str]:
    """Return the versions of snclr, Python and the libraries that determine results."""
    others = {name: version(name) for name in ("torch", "torchvision", "timm", "numpy", "pillow")}
    return {"snclr": __version__, "python": platform.python_version(), **others}


def command_line() -> str | None:
    """Return the command line of this process, or None if it was not started as `snclr` or `python -m snclr`."""
    program = Path(sys.argv[0])
    if program.stem != "snclr" and program.parts[-2:] != ("snclr", "__main__.py"):
        return None
    return shlex.join(["snclr", *sys.argv[1:]])
