"""`snclr doctor` as a process: every row on this machine, and a fault that it must find."""

import json
import os
import subprocess
import sys

import pytest

from snclr.cli.main import main
from snclr.diagnostics.suite import CHECKS
from snclr.methods.config import METHODS

SWAPPED_TOPK = """
import sys
from snclr.methods.common import kernels
from snclr.cli.main import main
exact = kernels.topk
def faulty(queries, keys, k, **options):
    values, index = exact(queries, keys, k, **options)
    index[:, 0] = index[:, 1]  # the second neighbor in place of the first
    return values, index
kernels.topk = faulty
sys.exit(main(sys.argv[1:]))
"""


def run(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=280)


@pytest.fixture(scope="module")
def result():
    done = run("-m", "snclr", "doctor", "--quick", "--json", "--device", "cpu", "--devices", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_every_group_has_rows_and_none_fails_on_this_machine(result):
    assert list(dict.fromkeys(row["group"] for row in result["rows"])) == list(CHECKS)
    assert result["exit_code"] == 0
    assert result["device"] == "cpu"
    assert [row for row in result["rows"] if row["outcome"] == "failed"] == []
    assert sum(result["counts"].values()) == len(result["rows"])


def test_rows_that_a_cpu_cannot_show_are_not_applicable_with_a_reason(result):
    rows = {f"{row['group']}: {row['name']}": row for row in result["rows"]}
    for name in (
        "machine: GPU", "machine: bf16", "machine: copies between GPUs", "kernels: color stage",
        "methods: all in float64", "methods: all in bf16", "methods: all in fp16", "host waits: all methods",
        "overflow: a gradient that overflows in fp16", "memory: demo: peak of a step",
        "memory: demo: largest batch on one GPU", "compile: demo",
    ):  # fmt: skip
        assert rows[name]["outcome"] == "not applicable", name
        assert rows[name]["value"], name


def test_checks_have_numbers_limits_and_advice(result):
    rows = {f"{row['group']}: {row['name']}": row for row in result["rows"]}
    for row in result["rows"]:
        assert row["outcome"] != "passed" or (row["limit"] and row["advice"]), row
    for method in METHODS:
        assert 0 < rows[f"methods: {method} in float32"]["number"] < 0.05
    assert rows["resume: 4 steps against 2 + resume + 2"]["number"] == 0
    assert len(rows["ranks: 1 rank against 2"]["details"]) == 4
    times = {name: rows[f"speed: demo: {name}"]["number"] for name in ("data", "color", "encoder", "loss", "step")}
    assert min(times.values()) > 0


def test_a_wrong_kernel_fails_its_row_and_the_exit_code_is_1():
    done = run("-c", SWAPPED_TOPK, "doctor", "--only", "kernels", "--device", "cpu")
    assert done.returncode == 1, done.stderr
    assert "FAILED kernels: top-k search" in done.stdout
    assert "update the driver" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("kernels: log-sum-exp") and "value" in line]
    assert "passed" in line


def test_an_unknown_group_or_device_is_refused(capsys):
    assert main(["doctor", "--only", "kernel"]) == 2
    assert "did you mean 'kernels'?" in capsys.readouterr().err
    assert main(["doctor", "--device", "cpu", "--devices", "none"]) == 2
    assert main(["doctor", "--device", "cuda:7"]) == 2
