"""What a step of SNCLR costs: its parts in seconds, from the sizes of a job, a network and a machine.

Symbols, as in `soft_neighbors`: B images in the batch of all processes, G processes, N = B/G images each, Q queue
entries, D dims, K neighbours, U distinct neighbours picked by the whole batch. One multiply-add is two operations.

    encoder     2 views × (forward and backward, 3F, and the momentum copy's forward, F') × N
    search      2 directions × 2·N·Q·D operations, and passes over N·Q similarities in memory
    loss        2 directions × value and gradient × 2·N·(B + U)·D operations, and passes over N·(B + U) logits
    gather      y2 and the picks of both directions, and the pushed keys with their ids: six messages
    batch norm  a message a layer and view forward, and one backward where it is trained
    gradient    an all-reduce of the trained parameters; what the backward pass does not hide
    update      optimiser and momentum copy: passes over the parameters
    queue       the push of B keys
    agreement   who stops, who failed, whose loss is not finite: two small all-reduces

Everything is a plain function of numbers; docs/scaling.md says which of them were measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# The tiles of streaming.py, which decide how many kernels are started.
_TOPK_BUFFER, _LSE_ROWS, _LSE_KEYS = 2**25, 1024, 2048
_TOPK_KERNELS, _LSE_KERNELS, _PUSH_KERNELS = 15, 10, 15
_TOPK_PASSES, _LSE_PASSES = 3, 8
_UPDATE_BYTES = 44
"""Bytes moved a parameter: AdamW reads and writes weight, gradient and two moments, the momentum copy follows."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """An encoder with its heads, at its image size."""

    name: str
    forward: float
    """F: operations of one image through encoder, projector and predictor."""
    momentum_forward: float
    """F': the same through the momentum encoder and projector."""
    parameters: int
    """Trained ones."""
    norms: int
    """Batch norms in the trained branch."""
    momentum_norms: int
    utilisation: float = 0.3
    """Share of a GPU's peak that its passes reach."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of one process's processor and of the network between the processes."""

    name: str
    peak: float
    """Operations a second in the encoder's precision, at best."""
    float32: float
    """Operations a second that float32 matrix products reach: search and loss are computed in float32."""
    memory: float
    """Bytes a second."""
    launch: float
    """Seconds to start one kernel."""
    start: float
    """Seconds to start one message, whatever its size and number of processes."""
    near_hop: float
    """Seconds a hop within a machine adds."""
    far_hop: float
    """Seconds a hop between machines adds."""
    near_link: float
    """Bytes a second into a process, where all processes are on one machine."""
    far_link: float
    """Bytes a second into a machine: what its processes gather or sum crosses its network once, for all of them."""
    per_machine: int = 8


@dataclass(frozen=True, kw_only=True)
class Job:
    """The sizes of a step."""

    batch: int
    processes: int
    queue: int = 128_000
    dim: int = 256
    neighbors: int = 30
    queue_bytes: int = 4
    """Bytes of a number in the queue: 4 for float32, 2 for float16."""

    @property
    def rows(self) -> float:
        """N: images of one process."""
        return self.batch / self.processes


A100 = Machine(
    name="A100", peak=312e12, float32=0.7 * 19.5e12, memory=0.8 * 1.555e12, launch=5e-6, start=10e-6, near_hop=1e-6,
    far_hop=5e-6, near_link=200e9, far_link=0.8 * 50e9,
)  # fmt: skip
V100 = Machine(
    name="V100", peak=125e12, float32=0.7 * 15.7e12, memory=0.8 * 0.9e12, launch=5e-6, start=10e-6, near_hop=1e-6,
    far_hop=5e-6, near_link=100e9, far_link=0.8 * 12.5e9,
)  # fmt: skip


def distinct_picks(job: Job) -> float:
    """U when every entry is as likely as any other; popular entries make it smaller, and it is at most min(B·K, Q).

    >>> round(distinct_picks(Job(batch=4096, processes=32)))
    78990
    """
    return job.queue * -math.expm1(-job.batch * job.neighbors / job.queue)


def queue_memory(job: Job) -> int:
    """Bytes of the queue on every process: features, ids and ages.

    >>> queue_memory(Job(batch=4096, processes=32))
    133120000
    """
    return job.queue * (job.dim * job.queue_bytes + 16)


def search_seconds(job: Job, machine: Machine) -> float:
    """Eq. 3 for this process's rows, in both directions."""
    pairs = job.rows * job.queue
    tiles = math.ceil(pairs / _TOPK_BUFFER)
    one = 2 * pairs * job.dim / machine.float32 + 4 * _TOPK_PASSES * pairs / machine.memory
    return 2 * (one + tiles * _TOPK_KERNELS * machine.launch)


def loss_seconds(job: Job, machine: Machine) -> float:
    """Eq. 2 with its gradient for this process's rows, in both directions."""
    picks = distinct_picks(job)
    pairs = job.rows * (job.batch + picks)
    tiles = math.ceil(job.rows / _LSE_ROWS) * (math.ceil(job.batch / _LSE_KEYS) + math.ceil(picks / _LSE_KEYS))
    own = 2 * 4 * job.rows * job.neighbors * job.dim  # the picked rows, for w and for the numerator
    one = 4 * pairs * job.dim / machine.float32 + (4 * _LSE_PASSES * pairs + own) / machine.memory
    return 2 * (one + tiles * _LSE_KERNELS * machine.launch)


def gather_seconds(job: Job, machine: Machine) -> float:
    """The keys, picks and ids of all processes on each: y2 and its picks a direction, then the pushed keys and ids."""
    sizes = [4 * job.dim, 8 * job.neighbors] * 2 + [4 * job.dim, 8]
    return sum(gather_message(job.batch * size, job.processes, machine) for size in sizes)


def gather_message(size: float, processes: int, machine: Machine) -> float:
    """An all-gather whose result has `size` bytes, round a ring of all processes; 0 for one process."""
    if processes == 1:
        return 0.0
    machines = math.ceil(processes / machine.per_machine)
    hops = (processes - machines) * machine.near_hop + (machines - 1) * machine.far_hop
    return machine.start + hops + size * (processes - 1) / processes / _link(processes, machine)


def reduce_message(size: float, processes: int, machine: Machine) -> float:
    """An all-reduce of `size` bytes: up and down a tree of machines."""
    if processes == 1:
        return 0.0
    machines = math.ceil(processes / machine.per_machine)
    near = min(processes, machine.per_machine) - 1
    hops = 2 * (near * machine.near_hop + math.ceil(math.log2(machines)) * machine.far_hop)
    return machine.start + hops + 2 * size * (processes - 1) / processes / _link(processes, machine)


def _link(processes: int, machine: Machine) -> float:
    return machine.near_link if processes <= machine.per_machine else machine.far_link


def norm_messages(network: Network) -> tuple[int, int]:
    """Messages of synchronised batch norm in a step: gathers forward and all-reduces backward, for two views."""
    return 2 * (network.norms + network.momentum_norms), 2 * network.norms


def step_parts(job: Job, network: Network, machine: Machine) -> dict[str, float]:
    """Seconds of every part of a step; their sum is the step, without waiting for data."""
    rate = machine.peak * network.utilisation
    trained, followed = 6 * network.forward, 2 * network.momentum_forward
    encoder = (trained + followed) * job.rows / rate
    backward = trained * 2 / 3 * job.rows / rate
    gathers, reduces = norm_messages(network)
    small = 8 * 1024  # bytes of a layer's statistics: they cost what an empty message costs
    norm = gathers * gather_message(small, job.processes, machine)
    norm += reduces * reduce_message(small, job.processes, machine)
    gradient = reduce_message(4 * network.parameters, job.processes, machine)
    pushed = 3 * job.batch * (4 * job.dim + 16) / machine.memory + _PUSH_KERNELS * machine.launch
    return {
        "encoder": encoder,
        "search": search_seconds(job, machine),
        "loss": loss_seconds(job, machine),
        "gather": gather_seconds(job, machine),
        "batch norm": norm,
        "gradient": max(0.0, gradient - backward),
        "update": _UPDATE_BYTES * network.parameters / machine.memory,
        "queue": pushed,
        "agreement": 2 * reduce_message(24, job.processes, machine),
    }


def queue_at_share(share: float, network: Network, machine: Machine, *, dim: int = 256) -> float:
    """The queue length at which the search takes `share` of the encoder's time, whatever batch and processes are."""
    image = (6 * network.forward + 2 * network.momentum_forward) / (machine.peak * network.utilisation)
    entry = 2 * (2 * dim / machine.float32 + 4 * _TOPK_PASSES / machine.memory)
    return share * image / entry


def queue_at_memory(size: float, *, dim: int = 256, queue_bytes: int = 4) -> int:
    """The queue length that fills `size` bytes on every process.

    >>> queue_at_memory(1e9)
    961538
    """
    return int(size // (dim * queue_bytes + 16))


def sharded_search_seconds(job: Job, machine: Machine) -> float:
    """Both directions with the queue cut into G parts: each process searches its part for all B rows, then they merge.

    The operations are the same, N·Q = B·(Q/G); what shrinks by G is memory. Added is a message with each part's K best
    of every row, values and indices.
    """
    merge = gather_message(job.rows * job.processes * job.neighbors * 12, job.processes, machine)
    return search_seconds(job, machine) + 2 * merge


def inverted_lists_speedup(queue: int, lists: int, probes: int) -> float:
    """How many times fewer products an inverted-list index needs: Q against `lists` centres and `probes` lists.

    >>> round(inverted_lists_speedup(128_000, lists=360, probes=16), 1)
    21.2
    """
    return queue / (lists + probes * queue / lists)
