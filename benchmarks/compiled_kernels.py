"""The kernels into which inductor fuses a function on an A100, found on shapes: nothing runs, and no GPU is needed.

The function is traced on fake CUDA tensors; inductor lowers and schedules it with the properties of an A100 and writes
its Triton kernels. The bytes of a kernel are inductor's: each buffer that it reads or writes counts once. Its
instructions are counted in the Triton source, per element and equal expressions once: an operation or an operator of an
index is one (a constant offset is part of the load), a division eight, a load or store two, also if a cache answers it.
What a row needs once is left out. This needs triton, but no driver.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

DIVISION, ACCESS = 8, 2
_A100: dict[str, Any] = {
    "multi_processor_count": 108, "major": 8, "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048, "warp_size": 32,
}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """Bytes that a kernel moves, and instructions of all its threads."""

    bytes: int
    instructions: int


def compiled_kernels(
    function: Callable[..., Tensor], shapes: list[tuple[tuple[int, ...], torch.dtype]], options: dict[str, Any]
) -> list[Kernel]:
    """Return the kernels of function(*tensors of these shapes and types) with the options of inductor."""
    from torch._inductor import config
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode()
    with mode:
        given = [torch.empty(shape, dtype=dtype, device="cuda:0") for shape, dtype in shapes]
        traced = make_fx(function, decomposition_table=select_decomp_table())(*given)
    graph: Any = GraphLowering(traced, example_inputs=given, is_inference=True)
    handlers: Any = V
    sources: list[str] = []

    def define(self: Any, source: str, *_: Any, **__: Any) -> str:
        sources.append(source)
        return f"kernel_{len(sources)}"

    with (
        _as_on_an_a100(), config.patch(options), handlers.set_graph_handler(graph), handlers.set_fake_mode(mode),
        handlers.set_debug_handler(DebugContext()), mock.patch.object(TritonScheduling, "define_kernel", define),
    ):  # fmt: skip
        graph.run(*given)
        graph._update_scheduler()
        graph.init_wrapper_code()
        scheduler, moved = graph.scheduler, []
        scheduler.current_device = given[0].device
        for node in scheduler.nodes:
            if type(node).__name__ != "NopKernelSchedulerNode":
                scheduler.current_node = node
                scheduler.get_backend(given[0].device).codegen_node(node)
                moved.append(int(node.get_read_write_buffers_sizes()))
    return [Kernel(size, count_instructions(source)) for size, source in zip(moved, sources, strict=True)]


@contextlib.contextmanager
def _as_on_an_a100() -> Iterator[None]:
    """Answer inductor's and triton's questions about the device."""
    from torch._inductor import scheduler
    from torch._inductor.runtime.hints import DeviceProperties

    triton: Any = importlib.import_module("triton")  # has no types, and is not installed on every machine
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 80, 32)
    properties = DeviceProperties(type="cuda", index=0, cc=80, **_A100)
    driver = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    with (
        mock.patch.object(triton.runtime.driver, "_active", driver),
        mock.patch.object(DeviceProperties, "create", return_value=properties),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace(minor=0, **_A100)),
        mock.patch.object(scheduler, "has_triton", return_value=True),
    ):
        yield


def count_instructions(source: str) -> int:
    """Return the instructions of a Triton kernel over all its elements.

    >>> count_instructions("def f(a):\\n xnumel = 10\\n x0 = xindex\\n t = tl.load(a + x0)\\n tl.store(a + x0, t / 2)")
    130
    """
    sizes = [int(size) for size in re.findall(r"^\s+(?:x|y|r0_)numel = (\d+)$", source, re.MULTILINE)]
    body = re.sub(r"def \S+\(", "def kernel(", source[source.index("def ") :])
    tree = ast.parse(body)
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("tl.load", "tl.store"):
            call.args[0] = _without_constants(call.args[0])
    lines = [line for line in ast.walk(tree) if isinstance(line, (ast.Assign, ast.Expr))]
    # Names that depend on the index of each axis. A tile of two axes computes once per row what depends on one of them.
    axes = (
        [{"r0_index"}] if "r0_numel" in source else [{f"{axis}index"} for axis in "xy" if f"{axis}numel = " in source]
    )
    seen: set[str] = set()
    found = 0
    for line in sorted(lines, key=lambda line: line.lineno):
        for names in axes:
            if isinstance(line, ast.Assign) and names & _names(line.value):
                names |= _names(*line.targets)
        for part in ast.walk(line.value):
            if all(names & _names(part) for names in axes):
                # Loads differ in their offsets, which were left out of the address.
                if (key := ast.dump(part)) not in seen or _weight(part) == ACCESS:
                    found += _weight(part)
                seen.add(key)
    return found * math.prod(sizes)


def _without_constants(address: ast.expr) -> ast.expr:
    """Return a sum without its constants, which are part of a load or store instruction."""
    if not (isinstance(address, ast.BinOp) and isinstance(address.op, ast.Add)):
        return address
    left, right = (_without_constants(side) for side in (address.left, address.right))
    if isinstance(left, ast.Constant):
        return right
    return left if isinstance(right, ast.Constant) else ast.BinOp(left, ast.Add(), right)


def _names(*parts: ast.AST) -> set[str]:
    return {node.id for part in parts for node in ast.walk(part) if isinstance(node, ast.Name)}


def _weight(part: ast.AST) -> int:
    if isinstance(part, ast.Call):
        name = ast.unparse(part.func)
        if name in ("tl.load", "tl.store"):
            return ACCESS
        return 0 if name.startswith(("tl.broadcast", "tl.full", "tl.arange")) else 1
    if isinstance(part, ast.BinOp):
        return DIVISION if isinstance(part.op, ast.Div) else 1
    return int(isinstance(part, (ast.Compare, ast.UnaryOp)))
