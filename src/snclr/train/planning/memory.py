"""Count the memory of a training step without allocating it: one step on fake tensors, which have shapes but no values.

Counted are tensors. A GPU needs more: about 1 GB for its driver and libraries, the workspaces of convolutions, and what
fragmentation wastes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from snclr.methods.base import Method, output_after
from snclr.train.build import build_method, encoder_spec, resolve_momentum, save_memory, view_sizes
from snclr.train.config import PretrainConfig
from snclr.train.optim import build_optimizer

HALF = {"bf16": torch.bfloat16, "16": torch.float16}
aten: Any = torch.ops.aten


@dataclass(frozen=True)
class StepMemory:
    """Bytes of the tensors on one device at the peak of a training step."""

    weights: int
    """Trained networks: parameters and buffers."""
    target: int
    """The target network, the EMA copy."""
    queue: int
    gradients: int
    """Gradients and, on several ranks, the buckets in which they are sent."""
    optimizer: int
    activations: int
    """Everything else at the peak: activations and views."""

    @property
    def total(self) -> int:
        """The peak."""
        return self.weights + self.target + self.queue + self.gradients + self.optimizer + self.activations


def count_memory(
    config: PretrainConfig,
    *,
    images: int,
    ranks: int = 1,
    classes: int | None = None,
    dataset_images: int | None = None,
) -> StepMemory:
    """Return the memory of a step with `images` images on each of `ranks` ranks and a full queue.

    `classes` and `dataset_images` describe the dataset, for methods whose size depends on it.

    The neighbors of a step are assumed to be different ones, which needs the most memory.
    """
    config = resolve_momentum(config, config.batch_size)  # any number serves
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        method = build_method(config, encoder_spec(config), classes, dataset_images)
    save_memory(method, config)
    method.train()
    if config.precision == "64":
        method.double()
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        method.to_empty(device="cpu")
        live.track([*method.parameters(), *method.buffers()])
        if method.queue is not None:
            method.queue._size = method.queue.capacity
        optimizer = build_optimizer(
            config.optimizer, method.named_parameters(), lr=0.0, weight_decay=config.weight_decay,
            weight_decay_on=config.weight_decay_on, constant_lr=method.constant_lr,
        )  # fmt: skip
        trained = [parameter for parameter in method.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()  # creates its state
        optimizer.zero_grad(set_to_none=True)
        live.peak = 0
        _run_step(method, config, images)
        optimizer.step()
        method.after_step(0, 1)
        state = bytes_of(value for values in optimizer.state.values() for value in values.values())
    gradients = bytes_of(trained)
    parts = _bytes_by_part(method)
    buckets = gradients if ranks > 1 else 0
    known = {**parts, "gradients": gradients, "optimizer": state}
    activations = max(0, live.peak - sum(known.values()))
    return StepMemory(**{**known, "gradients": gradients + buckets}, activations=activations)


def _run_step(method: Method, config: PretrainConfig, images: int) -> None:
    """Run forward and backward passes as `PretrainTask` does."""
    dtype = torch.float64 if config.precision == "64" else torch.float32
    batch = [torch.empty(images, 3, size, size, dtype=dtype) for size in view_sizes(config)]
    views = [view.to(HALF.get(config.precision, dtype)) for view in batch]
    ids, labels = torch.zeros(images, dtype=torch.int64), torch.zeros(images, dtype=torch.int64)
    losses = method.losses(views, ids, epoch=config.epochs, labels=labels)
    for _ in range(method.loss_parts):
        with _autocast(config.precision):
            loss = next(losses)
        loss.backward()  # type: ignore[no-untyped-call]
    with _autocast(config.precision):
        output_after(losses)


def _autocast(precision: str) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=HALF[precision]) if precision in HALF else nullcontext()


def _bytes_by_part(method: Method) -> dict[str, int]:
    """Return the bytes of the trained networks, the target network and the queue."""
    queue = 0 if method.queue is None else _module_bytes(method.queue)
    target = sum(_module_bytes(child) for name, child in method.named_children() if name.startswith("momentum_"))
    return {"weights": _module_bytes(method) - target - queue, "target": target, "queue": queue}


def _module_bytes(module: nn.Module) -> int:
    return bytes_of([*module.parameters(), *module.buffers()])


def bytes_of(values: Iterable[Any]) -> int:
    """Return the bytes of the tensors among the values."""
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block, count the bytes of the tensors that exist: `now` and at the `peak`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def track(self, tensors: Iterable[Any]) -> None:
        """Count tensors until they are deleted; views of a counted tensor add nothing."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._known:
                    self._known.add(key)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._forget, key, storage.nbytes())
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replaced = WITHOUT_VALUES.get(func) if args and isinstance(args[0], FakeTensor) else None
        out = func(*args, **(kwargs or {})) if replaced is None else replaced(*args)
        self.track(tree_leaves(out))
        return out


WITHOUT_VALUES: dict[Any, Any] = {
    aten.nonzero.default: lambda x: torch.empty(x.numel(), x.ndim, dtype=torch.int64),
    aten.repeat_interleave.Tensor: lambda repeats, **_: torch.empty(len(repeats), dtype=torch.int64),
    aten._local_scalar_dense.default: lambda x: 1.0 if x.is_floating_point() else 1,
    aten._unique2.default: lambda x, *_: (x.flatten(), torch.empty_like(x), torch.empty_like(x[:0])),
}
"""Operations whose result has a shape or value that fake tensors do not have; the largest shape, or any value."""
