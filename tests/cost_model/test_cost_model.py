"""The cost model against counts by hand, and the page that benchmarks/scaling.py writes."""

import re
import runpy
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from benchmarks import cost_model as model
from benchmarks.cost_model import A100, V100, Job, Machine, Network
from hypothesis import given
from hypothesis import strategies as st

from snclr.cli.main import parse
from snclr.methods.common.queue import NeighborQueue
from snclr.train.config import all_settings, resolve

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "clusters.md"
VIT = Network(name="ViT", forward=9.2e9, momentum_forward=9.2e9, parameters=26_000_000, norms=2, momentum_norms=1)
RESNET = Network(
    name="ResNet", forward=8.2e9, momentum_forward=8.2e9, parameters=35_000_000, norms=55, momentum_norms=54
)
# only operations cost time; each test sets the cost of what it checks
IDEAL = Machine(
    name="ideal", peak=1e12, float32=1e12, memory=1e30, launch=0.0, start=0.0, near_hop=0.0, far_hop=0.0,
    near_link=1e30, far_link=1e30,
)  # fmt: skip

jobs = st.builds(
    lambda rows, world_size, queue, neighbors: Job(
        batch=rows * world_size, world_size=world_size, queue=queue, neighbors=neighbors
    ),
    st.integers(1, 256), st.integers(1, 512), st.integers(100, 1_000_000), st.integers(1, 50),
)  # fmt: skip


def test_search_and_loss_cost_their_matrix_products():
    job = Job(batch=64, world_size=4, queue=1000, dim=8, neighbors=3)
    assert model.search_seconds(job, IDEAL) == pytest.approx(2 * (2 * 16 * 1000 * 8) / 1e12)
    keys = 64 + model.distinct_picks(job)
    assert model.loss_seconds(job, IDEAL) == pytest.approx(2 * 2 * (2 * 16 * keys * 8) / 1e12)


def test_distinct_picks_match_uniform_draws():
    job = Job(batch=100, world_size=1, queue=500, neighbors=4)
    generator = torch.Generator().manual_seed(0)
    drawn = [len(torch.randint(500, (400,), generator=generator).unique()) for _ in range(200)]
    assert model.distinct_picks(job) == pytest.approx(sum(drawn) / 200, rel=0.01)


@given(jobs)
def test_picks_are_at_most_the_queue_and_at_most_all_neighbors(job):
    assert 0 < model.distinct_picks(job) <= min(job.queue, job.batch * job.neighbors) * (1 + 1e-12)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float16, 2)])
def test_queue_memory_is_the_size_of_its_buffers(dtype, size):
    queue = NeighborQueue(100, 16, dtype=dtype)
    held = sum(part.numel() * part.element_size() for part in (queue.features, queue.ids, queue.pushed_at))
    job = Job(batch=8, world_size=1, queue=100, dim=16, queue_bytes=size)
    assert model.queue_memory(job) == held
    assert model.queue_at_memory(held, dim=16, queue_bytes=size) == 100


@given(jobs, st.sampled_from([A100, V100]), st.sampled_from([VIT, RESNET]))
def test_one_rank_sends_no_messages(job, machine, network):
    parts = model.step_parts(job, network, machine)
    messages = ("gather", "batch norm", "agreement")
    assert all(seconds >= 0 for seconds in parts.values())
    assert all(parts[name] > 0 for name in parts if name not in (*messages, "gradient"))
    assert all((parts[name] > 0) == (job.world_size > 1) for name in messages)


@given(jobs, st.integers(2, 8))
def test_a_longer_queue_costs_search_and_memory_but_no_communication(job, times):
    longer = replace(job, queue=job.queue * times)
    short, long = (model.step_parts(j, VIT, A100) for j in (job, longer))
    assert long["search"] > short["search"]
    assert long["loss"] >= short["loss"] * (1 - 1e-12)
    assert long["gather"] == short["gather"]
    assert model.queue_memory(longer) == times * model.queue_memory(job)


def test_weak_scaling_keeps_encoder_and_search_constant():
    one, two = (model.step_parts(Job(batch=128 * n, world_size=n), VIT, A100) for n in (32, 64))
    assert two["encoder"] == pytest.approx(one["encoder"])
    assert two["search"] == pytest.approx(one["search"])
    assert two["loss"] > one["loss"]  # every row is compared with the keys of all ranks
    assert two["gather"] > one["gather"]


@pytest.mark.parametrize("machine", [A100, V100])
@pytest.mark.parametrize("network", [VIT, RESNET])
def test_queue_at_share_gives_that_share(machine, network):
    length = round(model.queue_at_share(0.05, network, machine))
    parts = model.step_parts(Job(batch=4096, world_size=16, queue=length), network, replace(machine, launch=0.0))
    assert parts["search"] / parts["encoder"] == pytest.approx(0.05, rel=1e-3)


def test_messages_of_batch_norm():
    assert model.norm_messages(VIT) == (6, 4)
    hop = replace(IDEAL, start=1.0)
    assert model.step_parts(Job(batch=64, world_size=8), VIT, hop)["batch norm"] == pytest.approx(10)


def test_messages_cross_nodes_only_if_there_are_several():
    far = replace(IDEAL, near_hop=1.0, far_hop=100.0, near_link=1e3, far_link=1e2)
    assert model.gather_message(8e3, 8, far) == pytest.approx(7 + 7)  # seven hops, 7/8 of the bytes
    assert model.gather_message(16e2, 16, far) == pytest.approx(14 + 100 + 15)
    assert model.reduce_message(8e3, 8, far) == pytest.approx(14 + 14)
    assert model.reduce_message(16e2, 16, far) == pytest.approx(2 * (7 + 100) + 30)


def test_the_gradient_all_reduce_overlaps_with_the_backward_pass():
    slow = replace(IDEAL, near_link=1e9)
    sent = model.reduce_message(4 * VIT.parameters, 8, slow)
    backward = 4 * VIT.forward / (slow.peak * VIT.utilization)  # of one image per rank
    assert 0 < backward < sent
    assert model.step_parts(Job(batch=8, world_size=8), VIT, slow)["gradient"] == pytest.approx(sent - backward)
    assert model.step_parts(Job(batch=8000, world_size=8), VIT, slow)["gradient"] == 0


def test_sharding_saves_memory_not_time():
    job = Job(batch=4096, world_size=32)
    assert model.sharded_search_seconds(job, A100) > model.search_seconds(job, A100)
    assert model.inverted_lists_speedup(128_000, 1, 1) < 1 < model.inverted_lists_speedup(128_000, 360, 16)


def test_the_benchmark_replaces_the_marked_sections_of_a_page(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as for a script
    scaling = runpy.run_path(str(ROOT / "benchmarks" / "scaling.py"))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a100 -->\nold\n<!-- /a100 -->\nafter\n")
    scaling["write"](page, {"a100": scaling["prediction_table"]([VIT], A100)})
    text = page.read_text()
    assert text.startswith("before\n<!-- a100 -->\n| A100 (calculated) | batch | GPUs |")
    assert text.endswith("|\n<!-- /a100 -->\nafter\n")
    assert "old" not in text
    assert text.count("| ViT |") == 4
    with pytest.raises(AssertionError, match="no section marked limits"):
        scaling["write"](page, {"limits": ""})


def page_commands():
    """The command lines of the page, each on one line."""
    blocks = "".join(re.findall(r"^```\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))
    return [line.strip() for line in re.sub(r"\s*\\\n\s*", " ", blocks).splitlines() if "snclr pretrain " in line]


def test_the_commands_of_the_page_are_valid():
    from torch.distributed.run import get_args_parser

    commands = page_commands()
    assert len(commands) == 7
    names = set(all_settings())
    for command in commands:
        flags = shlex.split(command.split("snclr pretrain ")[1])
        given_ = {k: v for k, v in parse(["pretrain", *flags]).arguments.items() if k in names}
        assert {"recipe", "data", "out", "resume"} <= given_.keys(), command
        config = resolve(given_)
        assert config.batch_size % 32 == 0, command
        if "torchrun" in command:
            launcher = get_args_parser().parse_args(shlex.split(command.split("torchrun ")[1]))
            assert launcher.module, command
            assert launcher.training_script == "snclr"
            assert launcher.standalone or launcher.rdzv_backend == "c10d"


def test_the_manifest_of_the_page_starts_as_many_pods_as_torchrun_waits_for():
    text = re.search(r"^apiVersion.*?(?=^```)", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[0]
    service, job = yaml.safe_load_all(text)
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    command = container["args"][0]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 4
    assert "--nnodes 4 --nproc-per-node 8 " in command
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert f"--rdzv-endpoint {job['metadata']['name']}-0.{pod['subdomain']}:" in command
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
