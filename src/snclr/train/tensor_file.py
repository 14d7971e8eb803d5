"""Write a safetensors file piece by piece, hashed on the way: no second copy in memory, no second pass over disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snclr.durable import write_all

_CHUNK = 8 << 20

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def safetensors_header(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> tuple[bytes, list[str]]:
    """The file's first bytes, and the order of tensors after them: widest type first, so each one is aligned."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPES or tensor.layout != torch.strided:
            kind = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name!r} ({kind}) cannot be saved; dense tensors of a plain real type can")
        if name == "__metadata__":
            raise ValueError("'__metadata__' is reserved by safetensors and cannot name a tensor")
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        entries[name] = {
            "dtype": _DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def safetensors_pieces(header: bytes, order: list[str], tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The file piece by piece: one tensor at a time is brought to the CPU, and none is copied that need not be."""
    yield header
    for name in order:
        flat = tensors[name].detach().to("cpu").resolve_neg().contiguous().reshape(-1)
        if flat.numel():
            yield flat.view(torch.uint8).numpy().data


def write_hashed(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write and sync a new file; its {"sha256", "size"}. A thread hashes each chunk while the disk takes it."""
    digest, size = hashlib.sha256(), 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with ThreadPoolExecutor(1) as hasher:
            for piece in pieces:
                for start in range(0, len(piece), _CHUNK):
                    chunk = memoryview(piece)[start : start + _CHUNK]
                    hashed = hasher.submit(digest.update, chunk)
                    write_all(fd, chunk)
                    hashed.result()
                    size += len(chunk)
        os.fsync(fd)
    finally:
        os.close(fd)
    return {"sha256": digest.hexdigest(), "size": size}
