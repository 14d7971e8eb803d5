"""Count the bytes that autograd graphs hold for their backward passes."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class SavedBytes(saved_tensors_hooks):
    """Within the block, `held` has the bytes of each saved tensor by key, and `peak` is the largest sum so far."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.peak = 0
        super().__init__(self._pack, lambda kept: kept.tensor)

    def _pack(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor, self.held)
        self.peak = max(self.peak, sum(self.held.values()))
        return kept


class _Kept:
    """A saved tensor; the graph drops it after its use."""

    def __init__(self, tensor: Tensor, held: dict[int, int]) -> None:
        self.tensor, self._held = tensor, held
        held[id(self)] = tensor.nbytes

    def __del__(self) -> None:
        del self._held[id(self)]
