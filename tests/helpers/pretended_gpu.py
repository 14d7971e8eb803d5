"""A pretended GPU: values on the CPU, CUDA's rules for mixing devices, and every host wait counted with its line.

It registers torch's spare device type under the name "pretend" for the whole process, so use it in a process of its
own. Within `PretendedGpu()` the device exists; tensors live there as after `.to("cuda")`. Collectives are answered as
if every rank had the values of this one.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torchvision  # noqa: F401  # registers its operations
from torch import Tensor
from torch.utils import _python_dispatch as dispatch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from tests.helpers import fused_batch_norm

NAME = "pretend"
_DummyBackendModule.get_amp_supported_dtype = lambda self: [torch.float16, torch.bfloat16]  # type: ignore[attr-defined]
_setup_privateuseone_for_python_backend(NAME)

# Operations whose result the host has to read: its value, or its shape.
WAITING = {
    "_local_scalar_dense", "nonzero", "bincount", "unique_dim", "unique_consecutive", "_unique2", "masked_select",
    "equal", "is_nonzero", "_linalg_svd", "_linalg_eigh", "histc", "nms",
}  # fmt: skip
MAY_MIX = {"copy_", "_to_copy", "index", "index_put", "index_put_"}
"""Operations for which CUDA accepts CPU tensors with dimensions: copies, and indices."""
HALF_PRECISION = ("conv2d", "linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum")
"""Operations that autocast runs in half precision; the others keep the precision of their inputs."""
_ACTIVE: list[PretendedGpu] = []


class DeviceTensor(Tensor):
    """A tensor on the pretended device, whose values are in `elem`."""

    elem: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl
    # A wrapper's shape cannot be changed in place; torchvision does so.
    unsqueeze_, squeeze_ = Tensor.unsqueeze, Tensor.squeeze

    @staticmethod
    def __new__(cls: type, elem: Tensor) -> DeviceTensor:
        options: dict[str, Any] = {"strides": elem.stride(), "storage_offset": elem.storage_offset()}
        return Tensor._make_wrapper_subclass(cls, elem.size(), **options, dtype=elem.dtype, device=f"{NAME}:0")  # type: ignore[attr-defined,no-any-return]

    def __init__(self, elem: Tensor) -> None:
        self.elem = elem

    def tolist(self) -> list[Any]:
        _ACTIVE[-1].record_wait("tolist")
        return self.elem.tolist()  # type: ignore[no-any-return]

    def numpy(self, **_: object) -> None:
        raise TypeError("a tensor on a GPU has no numpy array")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _ACTIVE[-1].run(func, args, kwargs or {})


class PretendedGpu(dispatch.TorchDispatchMode):
    """Within the block the device exists; `waits` counts (operation, line of the package), `kernels` the launches."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: collections.Counter[tuple[str, str]] = collections.Counter()
        self.collectives: collections.Counter[str] = collections.Counter()
        self.kernels = 0
        self.bytes = 0
        self.dtypes: dict[str, set[torch.dtype]] = collections.defaultdict(set)

    def reset(self) -> None:
        """Forget what was counted."""
        self.waits.clear()
        self.collectives.clear()
        self.dtypes.clear()
        self.kernels = self.bytes = 0

    def __enter__(self) -> PretendedGpu:
        _ACTIVE.append(self)
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        torch._C._set_only_lift_cpu_tensors(False)
        _ACTIVE.pop()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def record_wait(self, what: str) -> None:
        """Count a wait of the host."""
        self.waits[what, package_line()] += 1

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation on the values, and check and count what it does on the device."""
        name, leaves = func.overloadpacket.__name__, tree_leaves((args, kwargs))
        ours = [t for t in leaves if isinstance(t, DeviceTensor)]
        if func.namespace == "c10d":
            return self._collective(func, name, args, kwargs)
        cpu = [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, DeviceTensor)]
        goal = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        if ours and name not in MAY_MIX and any(t.ndim for t in cpu):
            raise RuntimeError(f"tensors of two devices in {func} at {package_line()}")
        if (what := _wait(func, name, args, kwargs, ours, goal)) is not None:
            self.record_wait(what)
        if name == "as_strided_":  # pooling sets the strides of (n, c, 1, 1)
            return args[0]
        plain_args, plain_kwargs = tree_map_only(DeviceTensor, lambda t: t.elem, (args, kwargs))
        if goal == NAME:
            plain_kwargs["device"] = "cpu"
        with dispatch._disable_current_modes():
            out = fused_batch_norm.KERNELS.get(name, func)(*plain_args, **plain_kwargs)
        if ours or goal == NAME:
            self._count(func, name, leaves, out)
        stays_on_cpu = not (goal == NAME or (ours and goal != "cpu"))
        if stays_on_cpu or (name == "copy_" and not isinstance(args[0], DeviceTensor)):
            return out
        if isinstance(kwargs.get("out"), DeviceTensor):
            return kwargs["out"]
        if name.endswith("_") and not name.startswith("_foreach"):
            return args[0]
        wrapped = tree_map_only(Tensor, DeviceTensor, out)
        aliases = any(returned.alias_info is not None for returned in func._schema.returns)
        return dispatch.return_and_correct_aliasing(func, args, kwargs, wrapped) if aliases else wrapped

    def _count(self, func: Any, name: str, leaves: Sequence[Any], out: Any) -> None:
        if func.is_view or name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach"):
            return
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.kernels += 1
        self.bytes += sum(t.nbytes for t in (*leaves, *results) if isinstance(t, Tensor))
        self.dtypes[name].update(t.dtype for t in results)

    def _collective(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Answer a collective as if every rank had this one's values."""
        self.collectives[name] += 1
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        on_device = any(isinstance(t, DeviceTensor) for t in tensors)
        self.collectives["on the device" if on_device else "on the CPU"] += 1
        plain, plain_kwargs = tree_map_only(DeviceTensor, lambda t: t.elem, (args, kwargs))
        with dispatch._disable_current_modes(), torch.no_grad():
            out = func(*plain, **plain_kwargs)  # by the fake process group, for the handle of the call
            if name == "allgather_":
                for outputs, given in zip(plain[0], plain[1], strict=True):
                    for output in outputs:
                        output.copy_(given)
            elif name == "_allgather_base_":
                output, given = plain[0], plain[1]
                output.view(-1, given.numel()).copy_(given.reshape(1, -1).expand(output.numel() // given.numel(), -1))
            elif name == "allreduce_":
                for tensor in plain[0]:
                    tensor.mul_(torch.distributed.get_world_size())
            elif name not in ("barrier", "broadcast_"):
                raise NotImplementedError(f"the pretended device has no {func}")
        return out if name == "barrier" else (args[0], out[1])


def _wait(
    func: Any, name: str, args: Any, kwargs: dict[str, Any], ours: list[DeviceTensor], goal: str | None
) -> str | None:
    """Return what the host waits for in an operation, or None.

    A copy waits unless it is `non_blocking`; whether its memory is pinned cannot be seen here.
    """
    if name == "_to_copy" and goal is not None and bool(ours) != (goal == NAME) and not kwargs.get("non_blocking"):
        return "copy"
    if name == "copy_" and isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor):
        blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        return "copy" if blocking else None
    if not ours:
        return None
    if name.startswith("index") and isinstance(args[1], (list, tuple)):
        indices = [i for i in args[1] if isinstance(i, Tensor)]
        if any(i.dtype == torch.bool for i in indices):
            return f"{name} by a mask"
        return f"{name} by CPU indices" if any(not isinstance(i, DeviceTensor) for i in indices) else None
    unknown_size = name == "repeat_interleave" and func._overloadname == "Tensor" and kwargs.get("output_size") is None
    return name if name in WAITING or unknown_size else None


def package_line() -> str:
    """Return file and line of the innermost caller in the package."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        _, found, path = frame.f_code.co_filename.partition("/src/snclr/")
        if found:
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside of the package"


def _register_autocast() -> Any:
    """Give the device the rule of CUDA's autocast: matrix products and convolutions in half precision.

    torchvision runs its own operations in float32.
    """
    key = torch._C.DispatchKey.AutocastPrivateUse1
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    rules = torch.library.Library("aten", "IMPL")
    vision_rules = torch.library.Library("torchvision", "IMPL")

    def casting(operation: Any, *, single: bool) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            half = torch.get_autocast_dtype(NAME)
            goal, source = (torch.float32, half) if single else (half, torch.float32)
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
                cast = lambda t: t.to(goal) if t.dtype == source else t  # noqa: E731
                return operation(*tree_map_only(Tensor, cast, args), **tree_map_only(Tensor, cast, kwargs))

        return run

    for name in HALF_PRECISION:
        rules.impl(name, casting(getattr(torch.ops.aten, name).default, single=False), "AutocastPrivateUse1")
    transposed = torch.ops.aten.conv_transpose2d.input
    rules.impl("conv_transpose2d.input", casting(transposed, single=False), "AutocastPrivateUse1")
    for name in ("nms", "roi_align"):
        operation = getattr(torch.ops.torchvision, name).default
        vision_rules.impl(name, casting(operation, single=True), "AutocastPrivateUse1")
    return fallback, rules, vision_rules


_LIBRARIES = _register_autocast()  # registered as long as this reference lives
