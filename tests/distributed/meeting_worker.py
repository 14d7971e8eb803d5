"""Run on several processes: meet a hundred times, one of them late at times; print which meetings left keys."""

import time

import torch.distributed as dist

from snclr.distributed import meet

if __name__ == "__main__":
    dist.init_process_group("gloo")
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
