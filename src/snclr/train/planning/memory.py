"""Count the memory of a training step without allocating it: one step on fake tensors, which have shapes but no values.

Counted are tensors. A GPU needs more: about 1 GB for its driver and libraries, the workspaces of convolutions, and what
fragmentation wastes.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from snclr.methods.base import Method, output_after
from snclr.methods.common.queue import NeighborQueue
from snclr.methods.jigsaw.pirl import MemoryBank
from snclr.train.build import (
    apply_memory_settings,
    build_method,
    encoder_spec,
    optimizer_for,
    resolve_momentum,
    view_sizes,
)
from snclr.train.config import PretrainConfig

HALF = {"bf16": torch.bfloat16, "16": torch.float16}
aten: Any = torch.ops.aten


def count_memory(
    config: PretrainConfig,
    *,
    images: int,
    ranks: int = 1,
    classes: int | None = None,
    dataset_images: int | None = None,
) -> dict[str, int]:
    """Return the bytes of a rank's tensors at the peak of a step with `images` images per rank and full queues.

    weights      trained networks: parameters and buffers, and any buffers of the method itself
    target       the target network, the EMA copy
    queue        queues and memory banks of features
    gradients    gradients and, on several `ranks`, the buckets in which they are averaged
    optimizer    state of the optimizer, e.g. its momentum
    activations  everything else at the peak: activations and views
    total        the sum

    `classes` and `dataset_images` describe the dataset, for methods whose size depends on it. No two neighbors of a
    step are assumed to be the same image, which needs the most memory.
    """
    config = resolve_momentum(config, config.batch_size)  # memory does not depend on the momentum
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        method = build_method(config, encoder_spec(config), classes, dataset_images)
    apply_memory_settings(method, config)
    method.train()
    if config.precision == "64":
        method.double()
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        method.to_empty(device="cpu")
        live.track([*method.parameters(), *method.buffers()])
        for queue in (module for module in method.modules() if isinstance(module, NeighborQueue)):
            queue._size = queue.capacity
        optimizer = optimizer_for(method, config)
        trained = [parameter for parameter in method.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()  # creates its state
        optimizer.zero_grad(set_to_none=True)
        live.peak = 0  # from here on: of a step after the first
        _run_step(method, config, images)
        optimizer.step()
        method.after_step(0, 1)
        state = bytes_of(value for values in optimizer.state.values() for value in values.values())
    parts = {**_bytes_by_part(method), "gradients": bytes_of(trained), "optimizer": state}
    parts["activations"] = max(0, live.peak - sum(parts.values()))
    parts["gradients"] *= 2 if ranks > 1 else 1
    return {**parts, "total": sum(parts.values())}


def _run_step(method: Method, config: PretrainConfig, images: int) -> None:
    """Run forward and backward passes as `PretrainTask._add_gradients` does."""
    dtype = torch.float64 if config.precision == "64" else torch.float32
    batch = [torch.empty(images, 3, size, size, dtype=dtype) for size in view_sizes(config)]
    views = [view.to(HALF.get(config.precision, dtype)) for view in batch]
    ids, labels = torch.zeros(images, dtype=torch.int64), torch.zeros(images, dtype=torch.int64)
    # After all epochs with frozen parts or without neighbors; the gate is open, since its counts are read as 1 of 1.
    losses = method.losses(views, ids, epoch=config.epochs, labels=labels)
    autocast = torch.autocast("cpu", dtype=HALF.get(config.precision), enabled=config.precision in HALF)
    for _ in range(method.loss_parts):
        with autocast:
            loss = next(losses)
        loss.backward()  # type: ignore[no-untyped-call]
    with autocast:
        output_after(losses)


def _bytes_by_part(method: Method) -> dict[str, int]:
    """Return the bytes of the trained networks, the target network, and the queues and memory banks."""
    queue = sum(_module_bytes(child) for child in method.modules() if isinstance(child, (NeighborQueue, MemoryBank)))
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
        replaced = DATA_DEPENDENT.get(func) if args and isinstance(args[0], FakeTensor) else None
        out = func(*args, **(kwargs or {})) if replaced is None else replaced(*args)
        self.track(tree_leaves(out))
        return out


DATA_DEPENDENT: dict[Any, Any] = {
    aten.nonzero.default: lambda x: torch.empty(x.numel(), x.ndim, dtype=torch.int64),
    aten.repeat_interleave.Tensor: lambda repeats, **_: torch.empty(len(repeats), dtype=torch.int64),
    aten._local_scalar_dense.default: lambda x: 1.0 if x.is_floating_point() else 1,
    aten._unique2.default: lambda x, *_: (x.flatten(), torch.empty_like(x), torch.empty_like(x[:0])),
}
"""Replacements of operations whose result depends on the values: the largest possible shape, or any value."""
