"""Memory limits given as text, and the memory that is available."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from snclr.errors import UserError

_AUTO_SHARE, _AUTO_MOST = 0.25, 2 * 10**9
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def cache_limit(setting: str) -> int:
    """Return the bytes that --cache-images allows: auto, never, or a size.

    >>> cache_limit("500MB"), cache_limit("1.5 GB"), cache_limit("never")
    (500000000, 1500000000, 0)
    """
    if setting == "never":
        return 0
    if setting == "auto":
        return min(int(_AUTO_SHARE * available_memory()), _AUTO_MOST)
    size = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg]?)b?", setting.strip().lower())
    if size is None:
        raise UserError(f"cache_images is {setting!r}; give auto, never, or a size such as 500MB or 4GB")
    return int(float(size[1]) * _UNITS[size[2]])


def available_memory() -> int:
    """Return the bytes this process can use without swapping, within the limit of its container; 0 if unknown."""
    free = []
    with suppress(OSError, IndexError, ValueError):
        free.append(int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024)
    with suppress(OSError, ValueError):  # "max": no limit
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        free.append(max(limit - int((group / "memory.current").read_text()), 0))
    return min(free, default=0)
