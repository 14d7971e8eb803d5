"""Sizes given as text."""

import pytest

from snclr.errors import UserError
from snclr.runtime import memory
from snclr.runtime.memory import image_cache_bytes, parse_bytes


def test_sizes_are_parsed():
    assert [parse_bytes(text, "x") for text in ("4096", "1K", "1.5GB", "2 MiB", "3t")] == [
        4096, 1000, 1_500_000_000, 2_000_000, 3 * 10**12,
    ]  # fmt: skip
    for text in ("", "GB", "-1", "0", "nan", "inf", "1e99", "5X"):
        with pytest.raises(UserError, match=f"x is '{text}'; give a number of bytes"):
            parse_bytes(text, "x")


def test_the_image_cache_is_a_quarter_of_the_free_memory_up_to_two_gigabytes(monkeypatch):
    for free, expected in ((10**9, 250_000_000), (10**12, 2 * 10**9), (0, 0)):
        monkeypatch.setattr(memory, "available_memory", lambda free=free: free)
        assert image_cache_bytes("auto") == expected
    assert [image_cache_bytes(text) for text in ("never", "0", "4GB")] == [0, 0, 4 * 10**9]
    with pytest.raises(UserError, match="cache_images is 'much'; give auto, never, or a size such as"):
        image_cache_bytes("much")
