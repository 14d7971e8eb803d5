"""Run on several processes: meet many times and print which meetings left keys, or meet once after one has died."""

import os
import sys
import threading
import time

import torch.distributed as dist

from snclr import distributed
from snclr.distributed import meet


def meet_many_times() -> None:
    """A hundred meetings, one process late at times; the first prints the numbers of those whose keys are there."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for meeting in range(100):
        if meeting % 50 == 25 and rank == 1:
            time.sleep(1)
        meet()
    dist.barrier()
    if rank == 0:
        store = dist.distributed_c10d._get_default_store()
        print(*(n for n in range(100) for other in range(size) if store.check([f"snclr/meeting-{n}/{other}"])))
    dist.barrier()
    dist.destroy_process_group()


def meet_without_one(patience: float) -> None:
    """The last process ends after the first meeting; the first prints whether the second one is left without it."""
    meet()
    if dist.get_rank() < dist.get_world_size() - 1:
        waiting = threading.Thread(target=meet, daemon=True)
        waiting.start()
        waiting.join(patience)
        if dist.get_rank() == 0:
            print("waiting" if waiting.is_alive() else "left", flush=True)
            time.sleep(0.5)  # the first keeps the store that the others look into
    os._exit(0)  # as one that dies does: no leave is taken


if __name__ == "__main__":
    dist.init_process_group("gloo")
    match sys.argv[1]:
        case "many":
            meet_many_times()
        case "died":
            meet_without_one(patience=60)
        case "elsewhere":  # a container of its own, where the same numbers mean other processes
            if dist.get_rank() == dist.get_world_size() - 1:
                distributed._home = lambda: "elsewhere"
            meet_without_one(patience=5)
