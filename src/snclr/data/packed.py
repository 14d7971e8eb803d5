"""Many names in two arrays, and arrays in one file: what indexes of millions of images are made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class PackedNames:
    """Strings end to end: `text` uint8, `ends` int64 (n,). A list would take ten times the memory and be slow to send.

    Names that are no UTF-8 are kept byte for byte, as Python keeps file names.

    >>> names = PackedNames.of(["a.jpg", "b/c.png"])
    >>> len(names), names[1], list(names[:1])
    (2, 'b/c.png', ['a.jpg'])
    """

    text: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        whole = self.text.dtype == np.uint8 and self.ends.dtype == np.int64 and self.text.ndim == self.ends.ndim == 1
        lengths = np.diff(self.ends, prepend=0) if whole else np.empty(0)
        if not whole or (lengths < 0).any() or (int(self.ends[-1]) if len(self.ends) else 0) != len(self.text):
            raise ValueError("the packed names do not fit together")

    @classmethod
    def of(cls, names: Iterable[str]) -> PackedNames:
        """Pack some names."""
        parts = [name.encode("utf-8", "surrogateescape") for name in names]
        lengths = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
        return cls(np.frombuffer(b"".join(parts), dtype=np.uint8), np.cumsum(lengths, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice | npt.NDArray[Any]) -> PackedNames: ...

    def __getitem__(self, index: int | slice | npt.NDArray[Any]) -> str | PackedNames:
        if isinstance(index, (slice, np.ndarray)):
            return PackedNames.of(self[int(i)] for i in np.arange(len(self))[index])
        index = range(len(self))[index]  # negative and far ones as a list takes them
        start = int(self.ends[index - 1]) if index else 0
        return self.text[start : int(self.ends[index])].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        text, start = self.text.tobytes(), 0
        for end in self.ends.tolist():
            yield text[start:end].decode("utf-8", "surrogateescape")
            start = end


def arrays_to_bytes(arrays: Arrays) -> bytes:
    """Write named arrays as a safetensors file in memory."""
    from safetensors.numpy import save

    return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def arrays_from_bytes(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """Read what `arrays_to_bytes` wrote; ValueError for anything else. No code is ever run by it."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return load(data)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no safetensors file: {error}") from error
