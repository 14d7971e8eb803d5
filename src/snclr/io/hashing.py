"""SHA-256 of files, JSON values and weights, as hexadecimal text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 8 << 20


def sha256_bytes(data: bytes) -> str:
    """Hash bytes."""
    return hashlib.sha256(data).hexdigest()


def sha256_text(text: str) -> str:
    """Hash text; file names that are not valid UTF-8 are allowed."""
    return sha256_bytes(text.encode("utf-8", "surrogateescape"))


def sha256_json(value: Any) -> str:
    """Hash a JSON value independently of the order of its keys.

    >>> sha256_json({"seed": 0, "epochs": 90}) == sha256_json({"epochs": 90, "seed": 0})
    True
    """
    return sha256_bytes(json.dumps(value, sort_keys=True).encode())


def sha256_file(path: Path, on_chunk: Callable[[int], None] = lambda size: None) -> str:
    """Hash a file in chunks; `on_chunk` receives the size of each, for progress."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            on_chunk(len(chunk))
    return digest.hexdigest()


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """Hash the names, dtypes, shapes and values of tensors, independently of their order and device.

    >>> import torch
    >>> a, b = torch.zeros(2), torch.ones(1)
    >>> weights_digest({"a": a, "b": b}) == weights_digest({"b": b, "a": a})
    True
    """
    import torch

    digest = hashlib.sha256()
    for key in sorted(state):
        value = state[key].detach().to("cpu").contiguous()
        digest.update(json.dumps([key, str(value.dtype), list(value.shape)]).encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
