"""Exact top-k and log-sum-exp without a full similarity matrix in memory, pairs of equal ids, and counts.

`topk` works on blocks of rows (about 128 MB), `logsumexp` on tiles of rows and keys (8 MB on a CPU). Up to
rounding they equal the plain expression in their docstring.

Shapes: N queries, M keys, D features, K neighbors, U selected keys, T keys per tile.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Elements of the similarity buffer of `topk` (128 MB in float32), and its minimum number of rows: matrix products with
# fewer rows are slow.
_TOPK_BUFFER = 2**25
_TOPK_MIN_ROWS = 16
# Columns per block of the two-level top-k: narrow blocks leave fewer candidates, wide blocks fewer block maxima.
_TOPK_BLOCK = 64
# Rows and keys per tile of `logsumexp`: 8 MB in float32, which fits a CPU's cache. A GPU computes fewer, larger tiles
# (128 MB), because every operation on a tile is a kernel to launch. Other devices than the CPU have the tile of GPUs.
_LSE_TILE = {"cpu": (1024, 2048)}
_LSE_GPU_TILE = (1024, 32768)


def topk(
    queries: Tensor, keys: Tensor, k: int, *, exclude: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of each row of `queries @ keys.T`, best first: values (N, K), key indices (N, K).

    `exclude` lists (row, key) pairs, ordered by row, that must not be chosen. If fewer than k keys remain, the rest of
    the row has value -inf and index -1.

    >>> q, c = torch.eye(2), torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
    >>> topk(q, c, 2)[1]
    tensor([[0, 1],
            [2, 1]])
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    n, m = queries.shape[0], keys.shape[0]
    values = queries.new_full((n, k), -torch.inf)
    index = torch.full((n, k), -1, dtype=torch.int64, device=queries.device)
    if n == 0 or m == 0:
        return values, index
    block = _TOPK_BLOCK if m > 4 * k * _TOPK_BLOCK else m  # for a short row one level is faster
    width = -(-m // block) * block
    rows = min(n, max(_TOPK_MIN_ROWS, _TOPK_BUFFER // width))
    keys_t = keys.to(queries.dtype).T
    buffer = queries.new_empty(rows, width)
    buffer[:, m:] = -torch.inf  # padding of the last block
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        similarity = buffer[: stop - start]
        torch.mm(queries[start:stop], keys_t, out=similarity[:, :m])
        if exclude is not None:
            _mask_pairs_(similarity, exclude[0] - start, exclude[1])
        top_values, top_index = _topk_of_rows(similarity, min(k, m), block)
        values[start:stop, : top_values.shape[1]] = top_values
        index[start:stop, : top_values.shape[1]] = top_index.masked_fill_(top_values == -torch.inf, -1)
    return values, index


def _mask_pairs_(similarity: Tensor, rows: Tensor, keys: Tensor) -> None:
    """Set the entries (row, key) to -inf in place; pairs whose row is outside of the block have no effect.

    Selecting the pairs inside would make the host wait for their number. For those outside, some entry is set to the
    minimum of itself and +inf.
    """
    inside = (rows >= 0) & (rows < similarity.shape[0])
    place = torch.where(inside, rows * similarity.stride(0) + keys, 0)
    bound = torch.where(inside, -torch.inf, torch.inf).to(similarity.dtype)
    similarity.view(-1).scatter_reduce_(0, place, bound, "amin")


def _topk_of_rows(similarity: Tensor, k: int, block: int) -> tuple[Tensor, Tensor]:
    """Return the exact top-k of each row in two levels: the k largest are in the k blocks with the largest maxima."""
    rows, width = similarity.shape
    if block == width:
        return similarity.topk(k, dim=1)
    blocks = similarity.view(rows, width // block, block)
    chosen = blocks.amax(dim=2).topk(k, dim=1, sorted=False).indices  # (rows, k)
    candidates = blocks.gather(1, chosen[:, :, None].expand(-1, -1, block)).view(rows, k * block)
    top_values, top_index = candidates.topk(k, dim=1)
    return top_values, chosen.gather(1, top_index // block) * block + top_index % block


def matching_pairs(query_ids: Tensor, key_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return all pairs (row, key) with `query_ids[row] == key_ids[key]`, ordered by row, in O((N + M) log M).

    >>> matching_pairs(torch.tensor([7, 5]), torch.tensor([5, 9, 7, 5]))
    (tensor([0, 1, 1]), tensor([2, 0, 3]))
    """
    sorted_ids, order = key_ids.sort(stable=True)
    first = torch.searchsorted(sorted_ids, query_ids)
    matches = torch.searchsorted(sorted_ids, query_ids, right=True) - first
    rows = torch.arange(len(query_ids), device=query_ids.device).repeat_interleave(matches)
    # Offset within the row's run of equal ids: running count minus the count at the start of the row.
    offset = torch.arange(len(rows), device=rows.device) - (matches.cumsum(0) - matches)[rows]
    return rows, order[first[rows] + offset]


def count_entries(index: Tensor, length: int) -> Tensor:
    """Return how often each of `length` entries is in `index`; -1 is none. Unlike `bincount`, the host does not wait.

    >>> count_entries(torch.tensor([[0, 2], [2, -1]]), 4)
    tensor([1, 0, 2, 0])
    """
    entries = index.flatten()
    counts = torch.zeros(length + 1, dtype=torch.int64, device=index.device)
    return counts.scatter_add_(0, torch.where(entries < 0, length, entries), torch.ones_like(entries))[:length]


@dataclass(frozen=True)
class Keys:
    """Keys for `logsumexp`: `keys[index]` (default all), each counted `count` times, without gradient."""

    keys: Tensor  # (M, D)
    index: Tensor | None = None  # (U,) default: all keys
    count: Tensor | None = None  # (U,) multiplicity in the sum; default: 1
    exclude: Tensor | None = None  # (N, E) positions in U that row n leaves out; -1: none

    def __len__(self) -> int:
        return len(self.keys) if self.index is None else len(self.index)

    def tiles(self, size: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Yield start, keys (T, D) and log counts (T,) tile by tile; indexed keys are copied one tile at a time."""
        for start in range(0, len(self), size):
            tile = slice(start, min(start + size, len(self)))
            keys = self.keys[tile] if self.index is None else self.keys.index_select(0, self.index[tile])
            yield start, keys.to(dtype), None if self.count is None else self.count[tile].to(dtype).log()

    def mask_excluded_(self, logits: Tensor, rows: slice, start: int) -> None:
        """Set the logits of `exclude` to -inf in a tile (n, T) that starts at key `start`."""
        if self.exclude is not None:
            position = self.exclude[rows] - start
            inside = (position >= 0) & (position < logits.shape[1])
            bound = torch.where(inside, -torch.inf, torch.inf).to(logits.dtype)  # +inf has no effect
            logits.scatter_reduce_(1, torch.where(inside, position, 0), bound, "amin")


def logsumexp(z: Tensor, key_sets: Sequence[Keys], tau: float) -> Tensor:
    """`log Σ_c count_c exp(z·c/τ)` over every key of `key_sets`, for each row of z (N, D) → (N,).

    The first key set must not exclude any key, so that every row has a finite maximum from the first tile on.
    One pass with a running maximum computes value and gradient in O(N·D) memory: the gradient of a log-sum-exp is the
    softmax-weighted mean of its keys, so the backward pass is one multiplication.

    >>> z, c = torch.eye(2), torch.eye(2)
    >>> same = torch.logsumexp(z @ c.T / 0.2, dim=1)
    >>> torch.allclose(logsumexp(z, [Keys(c)], tau=0.2), same)
    True
    """
    return _StreamingLogSumExp.apply(z, tuple(key_sets), tau)


class _StreamingLogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, key_sets: tuple[Keys, ...], tau: float) -> Tensor:
        scaled = z.detach() / tau
        maximum = scaled.new_full((len(z), 1), -torch.inf)
        total = scaled.new_zeros(len(z), 1)
        weighted_sum = torch.zeros_like(scaled) if ctx.needs_input_grad[0] else None
        tile_rows, tile_keys = _LSE_TILE.get(z.device.type, _LSE_GPU_TILE)
        longest = max(len(key_set) for key_set in key_sets)
        buffer = scaled.new_empty(min(tile_rows, len(z)), min(tile_keys, longest))
        for key_set in key_sets:
            for first, keys, log_count in key_set.tiles(tile_keys, z.dtype):
                for start in range(0, len(z), tile_rows):
                    rows = slice(start, min(start + tile_rows, len(z)))
                    logits = buffer[: rows.stop - rows.start, : len(keys)]
                    if log_count is None:
                        torch.mm(scaled[rows], keys.T, out=logits)
                    else:
                        torch.addmm(log_count, scaled[rows], keys.T, out=logits)
                    key_set.mask_excluded_(logits, rows, first)
                    new_maximum = torch.maximum(maximum[rows], logits.amax(dim=1, keepdim=True))
                    scale = maximum[rows].sub_(new_maximum).exp_()  # rescales the sums to the new maximum
                    logits.sub_(new_maximum).exp_()
                    total[rows] = total[rows].mul_(scale).add_(logits.sum(dim=1, keepdim=True))
                    if weighted_sum is not None:
                        weighted_sum[rows].mul_(scale).addmm_(logits, keys)
                    maximum[rows] = new_maximum
        if weighted_sum is not None:
            ctx.save_for_backward(weighted_sum.div_(total.mul(tau)))
        return total.log_().add_(maximum).squeeze(1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (dz,) = ctx.saved_tensors
        return dz * grad[:, None], None, None
