"""Analytical cost of an SNCLR training step: seconds of its parts for a job, a network and a machine.

Symbols: global batch B, world size G, N = B/G images per rank, Q queue entries, D dimensions, K neighbors, U distinct
neighbors selected by the whole batch. One multiply-add is two operations.

    color       2 views × instructions of, and passes over, N·3·S² values of S pixels a side, the longer of both, if the
                color stage runs on the same processor
    encoder     2 views × (forward and backward, 3F, and the target network's forward, F') × N
    search      2 directions × 2·N·Q·D operations, and passes over N·Q similarities in memory
    loss        2 directions × value and gradient × 2·N·(B + U)·D operations, and passes over N·(B + U) logits
    gather      all_gather of y2 and the selected neighbors in both directions, and of the pushed keys with ids: 6 calls
    batch norm  one all_gather per layer and view forward, and one all_reduce backward if trained
    gradient    all_reduce of the trained parameters, minus the part that overlaps with the backward pass
    update      optimizer and target network: passes over the parameters
    queue       the push of B keys
    agreement   one all_gather of the ranks' stop and error flags, one all_reduce of the loss and its non-finite flag

docs/reference/scaling.md states which numbers were measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Tile sizes of methods/common/kernels.py on a CPU, which determine the number of kernel launches. Those of a GPU are
# larger, so that what is predicted for one is an upper bound.
_TOPK_BUFFER, _LSE_ROWS, _LSE_KEYS = 2**25, 1024, 2048
_TOPK_KERNELS, _LSE_KERNELS, _PUSH_KERNELS = 15, 10, 15
_TOPK_PASSES, _LSE_PASSES = 3, 8
_COLOR_KERNELS, _COLOR_PASSES, _COLOR_INSTRUCTIONS = 10, 6.1, 397
"""The compiled color stage as counted by device.py: kernels for two views with their copies of parameters, bytes moved
per byte of a float32 view, and instructions per value of a view."""
_UPDATE_BYTES = 44
"""Bytes moved per parameter: AdamW reads and writes weight, gradient and two moments; the EMA update follows."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """An encoder with its heads at its image size."""

    name: str
    forward: float  # F: operations of one image through encoder, projector and predictor
    momentum_forward: float  # F': operations of one image through the target encoder and projector
    parameters: int  # trained parameters
    norms: int  # batch norms in the trained branch
    momentum_norms: int
    utilization: float = 0.3  # share of a GPU's peak that its passes reach


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of the processor of one rank and of the interconnect."""

    name: str
    peak: float  # peak operations per second in the encoder's precision
    float32: float  # achieved operations per second of float32 matrix products, for search and loss
    memory: float  # memory bandwidth in bytes per second
    launch: float  # seconds per kernel launch
    start: float  # fixed latency of a collective in seconds
    near_hop: float  # latency per hop within a node
    far_hop: float  # latency per hop between nodes
    near_link: float  # bytes per second into a rank if all ranks are on one node
    far_link: float  # bytes per second into a node; data for all of its ranks crosses the network once
    ranks_per_node: int = 8
    colors: bool = True  # whether the color stage runs on the processor of the step, as on a GPU
    instructions: float = math.inf  # achieved instructions per second of all threads, for fused element-wise kernels


@dataclass(frozen=True, kw_only=True)
class Job:
    """The sizes of a step."""

    batch: int
    world_size: int
    queue: int = 128_000
    dim: int = 256
    neighbors: int = 30
    queue_bytes: int = 4  # bytes of a number in the queue: 4 for float32, 2 for float16
    image_size: int = 224  # S: side of a view in pixels

    @property
    def rows(self) -> float:
        """N: images per rank."""
        return self.batch / self.world_size


A100 = Machine(
    name="A100", peak=312e12, float32=0.7 * 19.5e12, memory=0.8 * 1.555e12, launch=5e-6, start=10e-6, near_hop=1e-6,
    far_hop=5e-6, near_link=200e9, far_link=0.8 * 50e9, instructions=0.7 * 64 * 108 * 1.41e9,
)  # fmt: skip
H100 = Machine(
    name="H100", peak=989e12, float32=0.7 * 67e12, memory=0.8 * 3.35e12, launch=5e-6, start=10e-6, near_hop=1e-6,
    far_hop=5e-6, near_link=300e9, far_link=0.8 * 50e9, instructions=0.7 * 64 * 132 * 1.98e9,
)  # fmt: skip
V100 = Machine(
    name="V100", peak=125e12, float32=0.7 * 15.7e12, memory=0.8 * 0.9e12, launch=5e-6, start=10e-6, near_hop=1e-6,
    far_hop=5e-6, near_link=100e9, far_link=0.8 * 12.5e9, instructions=0.7 * 64 * 80 * 1.53e9,
)  # fmt: skip


def distinct_picks(job: Job) -> float:
    """Return U if all entries are equally likely; an upper estimate, at most min(B·K, Q).

    >>> round(distinct_picks(Job(batch=4096, world_size=32)))
    78990
    """
    return job.queue * -math.expm1(-job.batch * job.neighbors / job.queue)


def queue_memory(job: Job) -> int:
    """Return the bytes of the queue on every rank: features, ids and ages.

    >>> queue_memory(Job(batch=4096, world_size=32))
    133120000
    """
    return job.queue * (job.dim * job.queue_bytes + 16)


def color_seconds(job: Job, machine: Machine) -> float:
    """Return the seconds of the color stage for both views of one rank's images; 0 if it runs elsewhere."""
    if not machine.colors:
        return 0.0
    values = 2 * job.rows * 3 * job.image_size**2
    moving, computing = _COLOR_PASSES * 4 * values / machine.memory, _COLOR_INSTRUCTIONS * values / machine.instructions
    return max(moving, computing) + _COLOR_KERNELS * machine.launch


def search_seconds(job: Job, machine: Machine) -> float:
    """Return the seconds of Eq. 3 for one rank's rows in both directions."""
    pairs = job.rows * job.queue
    tiles = math.ceil(pairs / _TOPK_BUFFER)
    one = 2 * pairs * job.dim / machine.float32 + 4 * _TOPK_PASSES * pairs / machine.memory
    return 2 * (one + tiles * _TOPK_KERNELS * machine.launch)


def loss_seconds(job: Job, machine: Machine) -> float:
    """Return the seconds of Eq. 2 and its gradient for one rank's rows in both directions."""
    picks = distinct_picks(job)
    pairs = job.rows * (job.batch + picks)
    tiles = math.ceil(job.rows / _LSE_ROWS) * (math.ceil(job.batch / _LSE_KEYS) + math.ceil(picks / _LSE_KEYS))
    own = 2 * 4 * job.rows * job.neighbors * job.dim  # the selected rows, for w and for the numerator
    one = 4 * pairs * job.dim / machine.float32 + (4 * _LSE_PASSES * pairs + own) / machine.memory
    return 2 * (one + tiles * _LSE_KERNELS * machine.launch)


def gather_seconds(job: Job, machine: Machine) -> float:
    """Return the seconds of all all_gather calls: y2 and its neighbors per direction, then the pushed keys and ids."""
    sizes = [4 * job.dim, 8 * job.neighbors] * 2 + [4 * job.dim, 8]
    return sum(gather_message(job.batch * size, job.world_size, machine) for size in sizes)


def gather_message(size: float, world_size: int, machine: Machine) -> float:
    """Return the seconds of a ring all_gather with a result of `size` bytes; 0 for one rank."""
    if world_size == 1:
        return 0.0
    nodes = math.ceil(world_size / machine.ranks_per_node)
    hops = (world_size - nodes) * machine.near_hop + (nodes - 1) * machine.far_hop
    return machine.start + hops + size * (world_size - 1) / world_size / _link(world_size, machine)


def reduce_message(size: float, world_size: int, machine: Machine) -> float:
    """Return the seconds of a tree all_reduce of `size` bytes."""
    if world_size == 1:
        return 0.0
    nodes = math.ceil(world_size / machine.ranks_per_node)
    near = min(world_size, machine.ranks_per_node) - 1
    hops = 2 * (near * machine.near_hop + math.ceil(math.log2(nodes)) * machine.far_hop)
    return machine.start + hops + 2 * size * (world_size - 1) / world_size / _link(world_size, machine)


def _link(world_size: int, machine: Machine) -> float:
    return machine.near_link if world_size <= machine.ranks_per_node else machine.far_link


def norm_messages(network: Network) -> tuple[int, int]:
    """Return the collectives of synchronized batch norm per step for two views: all_gather, all_reduce."""
    return 2 * (network.norms + network.momentum_norms), 2 * network.norms


def step_parts(job: Job, network: Network, machine: Machine) -> dict[str, float]:
    """Return the seconds of each part of a step, without data wait."""
    rate = machine.peak * network.utilization
    trained, followed = 6 * network.forward, 2 * network.momentum_forward
    encoder = (trained + followed) * job.rows / rate
    backward = trained * 2 / 3 * job.rows / rate
    gathers, reduces = norm_messages(network)
    small = 8 * 1024  # bytes of a layer's statistics; latency dominates
    norm = gathers * gather_message(small, job.world_size, machine)
    norm += reduces * reduce_message(small, job.world_size, machine)
    gradient = reduce_message(4 * network.parameters, job.world_size, machine)
    pushed = 3 * job.batch * (4 * job.dim + 16) / machine.memory + _PUSH_KERNELS * machine.launch
    return {
        **({"color": color_seconds(job, machine)} if machine.colors else {}),
        "encoder": encoder,
        "search": search_seconds(job, machine),
        "loss": loss_seconds(job, machine),
        "gather": gather_seconds(job, machine),
        "batch norm": norm,
        "gradient": max(0.0, gradient - backward),
        "update": _UPDATE_BYTES * network.parameters / machine.memory,
        "queue": pushed,
        "agreement": gather_message(32 * job.world_size, job.world_size, machine)
        + reduce_message(8, job.world_size, machine),
    }


def queue_at_share(share: float, network: Network, machine: Machine, *, dim: int = 256) -> float:
    """Return the queue length whose search takes `share` of the encoder's time, for any batch and world size."""
    image = (6 * network.forward + 2 * network.momentum_forward) / (machine.peak * network.utilization)
    entry = 2 * (2 * dim / machine.float32 + 4 * _TOPK_PASSES / machine.memory)
    return share * image / entry


def queue_at_memory(size: float, *, dim: int = 256, queue_bytes: int = 4) -> int:
    """Return the queue length that fills `size` bytes on every rank.

    >>> queue_at_memory(1e9)
    961538
    """
    return int(size // (dim * queue_bytes + 16))


def sharded_search_seconds(job: Job, machine: Machine) -> float:
    """Return the search seconds with the queue sharded over G ranks: each searches its shard for all B rows.

    The operations are the same, N·Q = B·(Q/G); memory shrinks by G. Merging adds an all_gather of each shard's K best
    values and indices per row.
    """
    merge = gather_message(job.rows * job.world_size * job.neighbors * 12, job.world_size, machine)
    return search_seconds(job, machine) + 2 * merge


def inverted_lists_speedup(queue: int, lists: int, probes: int) -> float:
    """Return the reduction of products by an inverted-list index with `lists` centers and `probes` probed lists.

    >>> round(inverted_lists_speedup(128_000, lists=360, probes=16), 1)
    21.2
    """
    return queue / (lists + probes * queue / lists)
