"""The counts of benchmarks/device.py against counts by hand, and the constants of the color stage in the cost model."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from snclr.train.config import resolve

pytest.importorskip("triton")  # writes the kernels of the color stage; torch installs it on Linux
ROOT = Path(__file__).parents[2]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")  # as for a script
    cost_model, device = importlib.import_module("cost_model"), importlib.import_module("device")
    compiled_kernels = importlib.import_module("compiled_kernels")
A100, H100, Job = cost_model.A100, cost_model.H100, cost_model.Job
JOB = Job(batch=64, world_size=4, queue=1000, dim=16, neighbors=3)
N, B, Q, D = 16, 64, 1000, 16


@pytest.fixture(scope="module")
def config():
    return resolve({"recipe": "demo", "data": "unused", "out": "unused", "image_size": 16})


@pytest.fixture(scope="module")
def parts(config):
    return device.count_parts(config, JOB)


def test_products_are_those_of_the_equations(parts):
    keys = B + round(cost_model.distinct_picks(JOB))
    assert parts["search"].operations == 2 * 2 * N * Q * D
    assert parts["lse"].operations == 2 * 2 * 2 * N * keys * D  # value and gradient in both directions
    rest = parts["loss"].operations - parts["lse"].operations
    assert 0 < rest < 2 * 10 * N * 3 * D  # the row's own neighbors


def test_the_encoder_is_counted_forward_and_backward(config):
    part = device.encoder_part(config, JOB)
    with FlopCounterMode(display=False) as expected:
        part()
    with device.counted(JOB) as counts:
        part()
    assert counts.operations == expected.get_total_flops() > 0
    assert counts.host_waits == 0


def test_the_host_waits_where_a_size_depends_on_values(parts):
    waits = {name: counts.host_waits for name, counts in parts.items()}
    assert waits == {"color": 0, "eager": 0, "search": 1, "lse": 0, "loss": 2, "encoder": 0}


def test_bytes_and_kernels_grow_as_they_should(config, parts):
    twice = device.count_parts(config, replace(JOB, batch=2 * B, world_size=4))
    assert twice["color"].kernels == parts["color"].kernels
    for name in ("color", "eager", "encoder"):
        assert twice[name].kernels == pytest.approx(parts[name].kernels, rel=0.2)  # rare transforms may be missing
        assert 1.5 < twice[name].bytes / parts[name].bytes < 2.5


def test_a_kernel_takes_the_longest_of_launch_memory_and_products():
    assert device.kernel_seconds(A100, 4, 0, half=False) == A100.launch
    assert device.kernel_seconds(A100, 10**9, 0, half=False) == pytest.approx(10**9 / A100.memory)
    assert device.kernel_seconds(A100, 4, 10**12, half=False) == pytest.approx(10**12 / A100.float32)
    assert device.kernel_seconds(H100, 4, 10**12, half=True) == pytest.approx(10**12 / (0.7 * 989e12))


def test_a_blocking_copy_is_a_wait_and_an_asynchronous_one_is_not():
    with device.counted(JOB) as counts:
        torch.ones(3).to("meta", non_blocking=True)
        assert counts.host_waits == 0
        torch.ones(3).to("meta")
        torch.empty(3, device="meta").nonzero()
    assert counts.host_waits == 2
    assert counts.kernels == 3


def test_the_cost_model_has_the_color_stage_as_counted():
    config = resolve({"recipe": "resnet50-imagenet", "data": "unused", "out": "unused"})
    job = Job(batch=512, world_size=4)
    counts = device.compiled_color_counts(config, job)
    views = 2 * 128 * 3 * 224**2 * 4
    assert counts.kernels == pytest.approx(cost_model._COLOR_KERNELS, abs=2)  # few images: the mean takes two kernels
    assert counts.bytes / views == pytest.approx(cost_model._COLOR_PASSES, rel=0.05)
    assert counts.seconds["A100"] == pytest.approx(cost_model.color_seconds(job, A100), rel=0.05)
    assert cost_model.color_seconds(job, replace(A100, colors=False)) == 0.0
    full = Job(batch=512, world_size=1)
    assert cost_model.color_seconds(full, A100) < 0.010


def test_compiled_kernels_are_counted_as_by_hand():
    n = 10**6
    shapes = [((n,), torch.float32)]
    (one,) = compiled_kernels.compiled_kernels(lambda x: (x * 2 + 1).exp(), shapes, {})
    assert one.bytes == 2 * 4 * n
    # load, product, sum, exponential, store; two addresses, one comparison with the size
    assert one.instructions == (2 + 1 + 1 + 1 + 2 + 2 + 1) * n
    both = compiled_kernels.compiled_kernels(lambda x: (x / x.sum()).relu(), shapes, {})
    assert sum(kernel.bytes for kernel in both) > 3 * 4 * n  # the sum is needed before the division
    assert sum(kernel.instructions for kernel in both) > (2 + 1 + 2 + 8 + 2) * n


def test_the_benchmark_prints_a_table_and_json():
    command = [
        sys.executable, "benchmarks/device.py", "--json", "--recipe", "demo", "--images", "8", "--gpus", "2",
        "--queue", "300", "--image-size", "16",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert "no GPU was measured" in done.stdout
    found = json.loads(done.stdout.splitlines()[-1])["demo"]
    assert list(found) == ["color", "eager", "search", "lse", "loss", "encoder"]
    assert all(counts["seconds"]["A100"] > counts["seconds"]["H100"] * 0.99 > 0 for counts in found.values())
