"""Run on several ranks: synchronized batch norm on each rank's rows; rank 0 writes the gathered results to a file."""

import sys

import torch
import torch.distributed as dist
from torch import nn

from snclr.distributed.collectives import all_gather, all_gather_rows, all_reduce_sum
from snclr.distributed.sync_batch_norm import SyncBatchNorm, synchronize_batch_norm
from tests.distributed.batch_norm_cases import CASES, build, rows_of


def main(out: str) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    for name in CASES:
        norm, x, weight = build(name)
        own_rows = rows_of(len(x), rank, size)
        layer = synchronize_batch_norm(nn.Sequential(norm))[0]
        assert isinstance(layer, SyncBatchNorm)
        x = x[own_rows].requires_grad_()
        y = layer(x)
        (y * weight[own_rows]).sum().backward()
        found[name] = {
            "output": all_gather_rows(y.detach()), "input": all_gather_rows(x.grad), "state": layer.state_dict(),
            "parameters": [all_reduce_sum(part.grad.clone()) for part in layer.parameters()],
            "evaluated": all_gather_rows(layer.eval()(x).detach()),
        }  # fmt: skip
    assert all_gather(torch.tensor([rank])).tolist() == list(range(size))
    if rank == 0:
        torch.save(found, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
