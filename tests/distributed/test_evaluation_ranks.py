"""Evaluations give the same result on one rank and on two."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from snclr.evaluation.results import read_results
from snclr.evaluation.session import data_of
from tests.distributed import evaluation_worker, fault_worker
from tests.distributed.launcher import run as start
from tests.distributed.launcher import torchrun
from tests.helpers import tiny_run


class Outcome(SimpleNamespace):
    """The results of one world size."""

    results: dict[str, Any]
    run: Path
    out: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    images = tiny_run.write_images(tmp_path_factory.mktemp("images"), each=28)
    return tiny_run.train(images, tmp_path_factory.mktemp("runs") / "run", attention="linear", attention_gradient=True)


@pytest.fixture(scope="module")
def outcomes(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Outcome]:
    both = []
    for world_size in (1, 2):
        folder = tmp_path_factory.mktemp(f"ranks{world_size}")
        run = Path(shutil.copytree(trained, folder / "run"))
        if world_size == 1:
            evaluation_worker.measure(run, folder)
        else:
            done = start(2, str(evaluation_worker.__file__), str(run), str(folder), timeout=280)
            assert done.returncode == 0, done.stderr[-3000:]
        both.append(Outcome(results=json.loads((folder / "results.json").read_text()), run=run, out=folder))
    return both[0], both[1]


def test_frozen_encoders_give_bit_identical_results(outcomes: tuple[Outcome, Outcome]) -> None:
    one, two = outcomes
    with np.load(one.out / "features.npz") as ours, np.load(two.out / "features.npz") as theirs:
        assert ours["keys"].tolist() == theirs["keys"].tolist()
        np.testing.assert_array_equal(ours["features"], theirs["features"])
    with np.load(one.out / "heads.npz") as ours, np.load(two.out / "heads.npz") as theirs:
        assert any(name.endswith("variance") for name in ours.files)  # the batch norm of MAE's protocol
        assert ours.files == theirs.files
        for name in ours.files:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    for name in ("knn", "linear", "probe", "mae"):
        first, second = ({**a.results[name], "time": None} for a in outcomes)
        assert first == second, name
    assert one.results["embed"]["skipped"] == two.results["embed"]["skipped"]
    assert len(one.results["embed"]["skipped"]) == 1


def test_neighbors_are_the_same(outcomes: tuple[Outcome, Outcome]) -> None:
    one, two = (a.results["neighbors"] for a in outcomes)
    assert one["rows"] == two["rows"]
    assert one["neighbor_purity"] == two["neighbor_purity"]
    assert one["protocol"] == two["protocol"]
    assert "learned f1 and f2" in one["protocol"]


def test_fine_tuning_is_equal_up_to_rounding(outcomes: tuple[Outcome, Outcome]) -> None:
    one, two = outcomes
    with np.load(one.out / "weights.npz") as ours, np.load(two.out / "weights.npz") as theirs:
        assert ours.files == theirs.files
        for name in ours.files:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-4, err_msg=name)
    assert one.results["finetune"]["numbers"] == two.results["finetune"]["numbers"]
    assert one.results["finetune"]["protocol"] == two.results["finetune"]["protocol"]
    assert one.results["finetune"]["skipped"] == two.results["finetune"]["skipped"]


def test_each_result_is_written_once(outcomes: tuple[Outcome, Outcome]) -> None:
    for a in outcomes:
        kinds = [result["kind"] for result in read_results(a.run)]
        assert kinds == ["knn", "linear-cached", "linear-paper", "linear-mae", "finetune", "neighbors"]
        left = sorted(path.name for path in (a.run / "evaluation").iterdir())
        assert left == ["baselines", "features"]


def test_the_command_line_prints_once(outcomes: tuple[Outcome, Outcome]) -> None:
    one, _ = outcomes
    done = start(2, "-m", "snclr", "knn", str(one.run), "--k", "7", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["numbers"] == one.results["knn"]["numbers"]


def test_bad_input_is_reported_once(trained: Path) -> None:
    done = start(2, "-m", "snclr", "knn", str(trained), "--test", str(trained))
    assert done.returncode != 0
    assert done.stderr.count("snclr knn: ") == 1
    assert "Traceback" not in done.stderr.split("snclr knn: ")[0]


def test_an_odd_number_of_labels_is_shared_and_an_unwritable_list_ends_both_ranks(trained: Path) -> None:
    argv = ("-m", "snclr", "finetune", str(trained), "--epochs", "1")
    done = start(2, *argv, "--labels", "17%", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(done.stdout.splitlines()[-1])
    images = len((trained / record["list"]).read_text().splitlines())
    assert images % 2 == 1
    assert record["settings"]["batch_size"] == images - 1
    in_the_way = trained / "finetune-50pct-seed0.txt"  # of the list
    in_the_way.mkdir()
    done = start(2, *argv, "--labels", "50%")
    in_the_way.rmdir()
    assert done.returncode != 0
    assert "snclr finetune: cannot write" in done.stderr
    assert "OSError" not in done.stderr
    assert "IsADirectoryError" not in done.stderr


def test_an_unwritable_figure_ends_both_ranks(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "in-the-way").write_text("")
    done = start(2, "-m", "snclr", "neighbors", str(trained), "--k", "2", "--out", str(tmp_path / "in-the-way/x.png"))
    assert done.returncode != 0
    assert done.stderr.count("snclr neighbors: cannot write") == 1
    assert "lost the connection" not in done.stderr


READERS = [("1", "knn", "--no-cache"), ("40", "finetune", "--labels", "50%", "--epochs", "4")]
"""The image at which rank 1 waits, and the command."""


@pytest.mark.parametrize("command", READERS, ids=["knn", "finetune"])
def test_a_read_error_of_one_rank_ends_both_and_is_reported_once(trained: Path, command: tuple[str, ...]) -> None:
    image, name, *flags = command
    done = start(2, str(fault_worker.__file__), "unreadable", image, name, str(trained), *flags, timeout=120)
    assert done.returncode == 2, done.stderr[-3000:]
    message = f"snclr {name}: rank 1 failed: the network is unreachable"
    assert done.stderr.count(message) == 1, done.stderr[-3000:]


@pytest.mark.parametrize("command", READERS, ids=["knn", "finetune"])
def test_a_stop_of_a_rank_that_waits_for_images_stops_both(trained: Path, command: tuple[str, ...]) -> None:
    image, name, *flags = command
    done = start(2, str(fault_worker.__file__), "waiting", image, name, str(trained), *flags, timeout=120)
    assert done.returncode == 143, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    again = start(2, "-m", "snclr", name, str(trained), *flags, "--json", timeout=120)
    assert again.returncode == 0, again.stderr[-3000:]
    assert json.loads(again.stdout.splitlines()[-1])["numbers"]["top1"] >= 0


OPENERS = [
    ("knn",),
    ("linear",),
    ("finetune", "--labels", "50%", "--epochs", "1"),
    ("embed", "--out", "features.npz"),
    ("neighbors", "--out", "neighbors.png"),
    ("search", "photos"),
]


@pytest.fixture
def two_nodes(trained: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The working directories of two nodes; only the first has the run's images, in photos/."""
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    shutil.copytree(data_of(trained), here / "photos")
    return here, there


@pytest.mark.parametrize("command", OPENERS, ids=lambda command: command[0])
def test_a_dataset_missing_on_one_rank_ends_both_and_is_reported_once(
    trained: Path, two_nodes: tuple[Path, Path], command: tuple[str, ...]
) -> None:
    here, there = two_nodes
    name, *flags = command
    argv = ("chdir", str(there), name, str(trained), *flags, "--data", "photos")
    done = start(2, str(fault_worker.__file__), *argv, cwd=here, timeout=120)
    assert done.returncode == 2, done.stderr[-3000:]
    message = f"snclr {name}: rank 1 failed: no dataset found for 'photos'"
    assert done.stderr.count(message) == 1, done.stderr[-3000:]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [*OPENERS[:1], *OPENERS[2:4]], ids=lambda command: command[0])
def test_ranks_with_different_images_are_rejected(
    trained: Path, two_nodes: tuple[Path, Path], command: tuple[str, ...]
) -> None:
    here, there = two_nodes
    name, *flags = command
    shutil.copytree(here / "photos", there / "photos")
    next((there / "photos").glob("*/*.png")).unlink()
    argv = ("chdir", str(there), name, str(trained), *flags, "--data", "photos")
    done = start(2, str(fault_worker.__file__), *argv, cwd=here, timeout=120)
    assert done.returncode == 2, done.stderr[-3000:]
    assert done.stderr.count(f"snclr {name}: rank 1 has different ") == 1, done.stderr[-3000:]


def test_ranks_with_different_runs_are_rejected(trained: Path, two_nodes: tuple[Path, Path]) -> None:
    here, there = two_nodes
    shutil.copytree(trained, here / "run")
    tiny_run.train(here / "photos", there / "run", seed=5)
    argv = ("chdir", str(there), "knn", "run", "--data", str(here / "photos"))
    done = start(2, str(fault_worker.__file__), *argv, cwd=here, timeout=120)
    assert done.returncode == 2, done.stderr[-3000:]
    assert done.stderr.count("snclr knn: rank 1 has different weights in run than rank 0") == 1, done.stderr[-3000:]


def test_a_stop_of_a_rank_that_opens_its_images_stops_both(trained: Path) -> None:
    done = start(2, str(fault_worker.__file__), "opening", "0", "knn", str(trained), timeout=120)
    assert done.returncode == 143, done.stderr[-3000:]
    assert done.stderr.count("stopped by SIGTERM") == 1, done.stderr[-3000:]
    assert "Traceback" not in done.stderr


def test_a_hanging_rank_ends_the_evaluation_and_is_named(trained: Path) -> None:
    done = start(2, str(fault_worker.__file__), "hang", "12", "knn", str(trained), "--no-cache", timeout=120)
    assert done.returncode != 0
    assert "snclr knn: rank 0 lost the connection" in done.stderr, done.stderr[-3000:]
    assert "Ranks that do not respond: 1." in done.stderr, done.stderr[-3000:]


def test_an_evaluation_ends_with_its_agent(trained: Path) -> None:
    # The ranks hold the pipes that are read here, so this returns when the last of them has ended.
    done = torchrun(2, str(fault_worker.__file__), "agent", "0", "knn", str(trained), "--no-cache", timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert done.stderr.count("stopped by SIGTERM") == 1, done.stderr[-3000:]
