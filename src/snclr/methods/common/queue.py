"""The queue of candidates C and the neighbor search (Eq. 3).

Shapes: N queries, K neighbors, Q queue entries, B rows per push, D features.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from snclr.errors import UserError
from snclr.methods.common import kernels
from snclr.methods.common.features import l2_normalize

Pairs = tuple[Tensor, Tensor]
"""Rows and candidates (P,) each."""


@dataclass(frozen=True)
class Neighbors:
    """The nearest candidates of each query, best first. A missing one has index -1 and similarity -inf."""

    index: Tensor  # (N, K) rows of C
    similarity: Tensor  # (N, K) cosine

    @property
    def mask(self) -> Tensor:
        """(N, K), False where there were fewer than K candidates."""
        return self.index >= 0

    def nearest(self, k: int) -> "Neighbors":
        """Return the first k neighbors of each query."""
        return Neighbors(self.index[:, :k], self.similarity[:, :k])

    def keep(self, kept: Tensor) -> "Neighbors":
        """Return the neighbors, those that are False in `kept` (N, K) marked as missing."""
        return Neighbors(self.index.where(kept, -1), self.similarity.where(kept, -torch.inf))


@torch.no_grad()
def nearest_neighbors(
    y2: Tensor, candidates: Tensor, k: int, *, ids: Tensor | None = None, candidate_ids: Tensor | None = None,
    exclude: Pairs | None = None,
) -> Neighbors:  # fmt: skip
    """Return the k candidates (Q, D) with the largest cosine to each row of y2 (N, D), both normalized (Eq. 3).

    A candidate whose id in `candidate_ids` (Q,) equals the row's id in `ids` (N,) is excluded. Without ids,
    `exclude` has the excluded pairs (row, candidate).
    """
    if ids is not None and candidate_ids is not None:
        exclude = kernels.matching_pairs(ids.to(candidate_ids), candidate_ids)
    similarity, index = kernels.topk(y2, candidates, k, exclude=exclude)
    return Neighbors(index, similarity)


def also_found(ids: Tensor, other_ids: Tensor) -> Tensor:
    """Return (N, K): whether each image id (N, K) of one search is among those of another; False for -1, missing."""
    return (ids[:, :, None] == other_ids[:, None, :]).any(dim=2) & (ids >= 0)


class NeighborQueue(nn.Module):
    """The candidate set C: the last `capacity` features pushed, each with its image id and age, first in, first out.

    The queue starts empty, so every candidate is a real feature. It is part of `state_dict()`, so a resumed run has the
    same neighbors. The capacity need not be a multiple of the batch size. With `search_dim`, each entry also has a
    feature of that dimension, and the search compares those.

    >>> queue = NeighborQueue(capacity=3, dim=2)
    >>> queue.push(torch.eye(2), ids=torch.tensor([10, 11]))
    >>> queue.search(torch.eye(2), k=2, ids=torch.tensor([10, 99])).index  # excludes the query's own image
    tensor([[ 1, -1],
            [ 1,  0]])
    """

    features: Tensor
    search_features: Tensor | None
    ids: Tensor
    pushed_at: Tensor

    def __init__(
        self, capacity: int, dim: int, *, dtype: torch.dtype = torch.float32, search_dim: int | None = None
    ) -> None:
        super().__init__()
        if capacity < 1 or dim < 1:
            raise UserError(f"capacity and dim of a queue must be at least 1, not capacity={capacity}, dim={dim}")
        self.register_buffer("features", torch.zeros(capacity, dim, dtype=dtype))
        self.register_buffer(
            "search_features", None if search_dim is None else torch.zeros(capacity, search_dim, dtype=dtype)
        )
        self.register_buffer("ids", torch.full((capacity,), -1))
        self.register_buffer("pushed_at", torch.zeros(capacity, dtype=torch.int64))
        self.position = 0  # row of the next feature
        self._size = 0  # filled rows, always the first ones
        self.pushes = 0  # pushes so far, the unit of an entry's age
        self.register_load_state_dict_pre_hook(_rename_births)  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return self._size

    @property
    def capacity(self) -> int:
        """Number of entries Q of a full queue; `len(queue)` is the current number."""
        return len(self.features)

    @property
    def candidates(self) -> Tensor:
        """The filled rows (len(queue), D)."""
        return self.features[: self._size]

    @property
    def search_candidates(self) -> Tensor:
        """The features of the filled rows that the search compares."""
        features = self.features if self.search_features is None else self.search_features
        return features[: self._size]

    @torch.no_grad()
    def push(self, features: Tensor, ids: Tensor, search_features: Tensor | None = None) -> None:
        """Append features (B, D) of images `ids` (B,), normalized; the oldest entries are replaced.

        `search_features` (B, search_dim) are required by a queue with `search_dim`.
        """
        if features.shape != (len(ids), self.features.shape[1]):
            shapes = f"{tuple(features.shape)} and {tuple(ids.shape)}"
            raise UserError(f"push takes features (B, {self.features.shape[1]}) and ids (B,), not {shapes}")
        if (self.search_features is None) != (search_features is None):
            raise UserError("push takes search_features if the queue has a search_dim, and only then")
        kept = slice(max(0, len(ids) - self.capacity), None)  # of a batch longer than the queue, keep the end
        features = l2_normalize(features[kept])
        slots = (self.position + torch.arange(len(ids), device=self.ids.device)[kept]) % self.capacity
        self.features[slots] = features.to(self.features)
        if self.search_features is not None and search_features is not None:
            self.search_features[slots] = l2_normalize(search_features[kept]).to(self.search_features)
        self.ids[slots] = ids[kept].to(self.ids)
        self.pushed_at[slots] = self.pushes
        self.position = (self.position + len(ids)) % self.capacity
        self._size = min(self.capacity, self._size + len(ids))
        self.pushes += 1

    @torch.no_grad()
    def search(
        self, query: Tensor, k: int, ids: Tensor | None = None, *, unique: bool = False, exclude: Pairs | None = None
    ) -> "Neighbors":
        """Return the k nearest entries of each query (N, D) (Eq. 3), excluding those of its own image in `ids` (N,).

        With `unique`, an image is found at most once, by its newest entry. `exclude` is `own_entries(ids)` and replaces
        `ids`, for several searches with the same ids.
        """
        candidates, candidate_ids = self.search_candidates, self.ids[: self._size]
        if exclude is not None:
            assert not unique, "give ids"
            return nearest_neighbors(query, candidates, k, exclude=exclude)
        if not unique or self._size == 0:
            return nearest_neighbors(query, candidates, k, ids=ids, candidate_ids=candidate_ids)
        rows = self.newest()
        found = nearest_neighbors(query, candidates[rows], k, ids=ids, candidate_ids=candidate_ids[rows])
        return Neighbors(rows[found.index.clamp(min=0)].where(found.mask, -1), found.similarity)

    def own_entries(self, ids: Tensor) -> Pairs:
        """Return the pairs (row of `ids`, entry) of the same image, ordered by row. The host waits for their number."""
        return kernels.matching_pairs(ids.to(self.ids), self.ids[: self._size])

    def newest(self) -> Tensor:
        """Return the rows of the newest entry of each image, in ascending order."""
        time = (torch.arange(self._size, device=self.ids.device) - self.position) % self.capacity  # the oldest has 0
        images, image = torch.unique(self.ids[: self._size], return_inverse=True)
        latest = torch.full_like(images, -1).scatter_reduce_(0, image, time, "amax")
        return (time == latest[image]).nonzero().squeeze(1)

    def ages(self, index: Tensor) -> Tensor:
        """Return how many pushes ago each entry was added: 1 for the newest. `index` must be >= 0."""
        return self.pushes - self.pushed_at[index]

    def ids_and_ages(self, neighbors: Neighbors) -> tuple[Tensor, Tensor]:
        """Return image ids (N, K), -1 where missing, and ages (N, K) of neighbors found in this queue."""
        index = neighbors.index.clamp(min=0)
        return self.ids[index].where(neighbors.mask, -1), self.ages(index)

    def get_extra_state(self) -> Tensor:
        """Return the three counters as a tensor, which any checkpoint format can store."""
        return torch.tensor([self.position, self._size, self.pushes])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the counters."""
        self.position, self._size, self.pushes = state.tolist()


def _rename_births(queue: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Accept the state of an earlier version, in which `pushed_at` had another name."""
    if f"{prefix}births" in state:
        state[f"{prefix}pushed_at"] = state.pop(f"{prefix}births")
