"""Run by torchrun: gradients of a small network on each rank, averaged by `GradientAverager`; written by rank 0."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

from snclr.distributed.gradients import GradientAverager

ROWS, WIDTH = 4, 7


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(2, WIDTH, 3), nn.Flatten(), nn.Linear(9 * WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    net[3].bias.requires_grad_(False)
    return net.to(memory_format=torch.channels_last)


def rows(rank: int, part: int) -> Tensor:
    return torch.randn(ROWS, 2, 5, 5, generator=torch.Generator().manual_seed(10 * rank + part))


def loss(net: nn.Module, images: Tensor) -> Tensor:
    return net(images).square().mean()


def main(out: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = network(seed=rank)  # overwritten by the weights of rank 0
    averager = GradientAverager(net, bucket_bytes=300)
    found = []
    for _ in range(3):  # the same step three times
        with averager.paused():
            loss(net, rows(rank, 0)).backward()
            averager.finish()
        loss(net, rows(rank, 1)).backward()
        averager.finish()
        found.append({name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None})
        net.zero_grad()
    if rank == 0:
        torch.save({"gradients": found, "buckets": len(averager._buckets)}, out)
    loss(net[:1], rows(rank, 0)).backward()
    try:
        averager.finish()
    except RuntimeError as error:
        assert "2.weight" in str(error)  # noqa: PT017
    else:
        raise AssertionError("a missing gradient was not noticed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
