"""Sizes given as text, and the memory that is available."""

from contextlib import suppress
from pathlib import Path

from snclr.errors import UserError

_AUTO_SHARE, _AUTO_MOST = 0.25, 2 * 10**9
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_bytes(
    text: str, option: str, allowed: str = "a number of bytes above 0, such as 4096, 512MB or 1.5GB"
) -> int:
    """Parse a size such as `512MB`, `1.5G` or `4096` (K = 1,000 bytes); `option` and `allowed` are for the error.

    >>> parse_bytes("512MB", "--shard-size")
    512000000
    """
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in _UNITS else ""
    try:
        value = float(number.removesuffix(unit)) * _UNITS[unit]
        if not 1 <= value < 2**62:
            raise ValueError
    except ValueError:
        raise UserError(f"{option} is {text!r}; give {allowed}") from None
    return int(value)


def image_cache_bytes(setting: str) -> int:
    """Return the bytes of decoded images that --cache-images allows: auto, never (or 0), or a size.

    >>> image_cache_bytes("500MB"), image_cache_bytes("1.5 GB"), image_cache_bytes("never")
    (500000000, 1500000000, 0)
    """
    if setting in ("never", "0"):
        return 0
    if setting == "auto":
        return min(int(_AUTO_SHARE * available_memory()), _AUTO_MOST)
    return parse_bytes(setting, "cache_images", "auto, never, or a size such as 500MB or 4GB")


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
