"""Run on several ranks with a timeout of 3 s: one rank is late for a long barrier, dies or hangs; rank 0 prints."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from snclr.distributed.collectives import create_cpu_groups, destroy_process_groups, long_barrier, name_missing_ranks
from snclr.errors import UserError


def print_line(line: str) -> None:
    """Print a line in one write: print() writes the line break separately, so lines of several ranks could mix."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    create_cpu_groups(timedelta(seconds=60))
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3))  # not before: ranks may start at different times
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    store = dist.distributed_c10d._get_default_store()
    began = time.monotonic()
    try:
        with name_missing_ranks():
            match sys.argv[1]:
                case "late":
                    if rank == last:
                        time.sleep(6)
                    long_barrier()
                case "dead":
                    if rank == last:
                        os._exit(0)
                    long_barrier()
                case "stopped":  # a rank that does not reach an ordinary collective
                    if rank == int(sys.argv[2]):
                        while store.add("printed", 0) < last:  # hang until the other ranks have reported it
                            time.sleep(0.1)
                        os._exit(0)
                    dist.all_reduce(torch.ones(1))
                case "bug":  # an error of one rank alone is not blamed on the others
                    if rank == last:
                        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
                    long_barrier()
        print_line(f"rank {rank} done after {time.monotonic() - began:.0f} s")
    except UserError as error:
        print_line(f"rank {rank}: {error}")
    except RuntimeError as error:
        print_line(f"rank {rank} raised {error}")
    store.add("printed", 1)
    destroy_process_groups()
