"""Evaluations give one answer, whether one process computes it or two."""

from __future__ import annotations

import json
import runpy
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from snclr.commands.evaluation import data_of
from snclr.evaluate.results import read_results
from tests.distributed import evaluation_worker, patience_worker
from tests.distributed.ranks import run as start
from tests.distributed.ranks import torchrun

tiny_run = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "unit" / "tiny_run.py")))


class Answers(SimpleNamespace):
    """What one number of processes found."""

    found: dict[str, Any]
    run: Path
    out: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    images = tiny_run.write_images(tmp_path_factory.mktemp("images"), each=28)
    return tiny_run.train(images, tmp_path_factory.mktemp("runs") / "run", attention="linear", attention_gradient=True)


@pytest.fixture(scope="module")
def answers(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Answers, Answers]:
    both = []
    for processes in (1, 2):
        place = tmp_path_factory.mktemp(f"on{processes}")
        run = Path(shutil.copytree(trained, place / "run"))
        if processes == 1:
            evaluation_worker.measure(run, place)
        else:
            done = start(2, str(evaluation_worker.__file__), str(run), str(place), timeout=280)
            assert done.returncode == 0, done.stderr[-3000:]
        both.append(Answers(found=json.loads((place / "results.json").read_text()), run=run, out=place))
    return both[0], both[1]


def test_frozen_encoders_give_the_same_answer_to_the_last_bit(answers: tuple[Answers, Answers]) -> None:
    one, two = answers
    with np.load(one.out / "features.npz") as ours, np.load(two.out / "features.npz") as theirs:
        assert ours["keys"].tolist() == theirs["keys"].tolist()
        np.testing.assert_array_equal(ours["features"], theirs["features"])
    for name in ("knn", "linear", "probe"):
        mine, other = ({**a.found[name], "time": None} for a in answers)
        assert mine == other, name
    assert one.found["embed"]["skipped"] == two.found["embed"]["skipped"]
    assert len(one.found["embed"]["skipped"]) == 1


def test_neighbours_are_the_same(answers: tuple[Answers, Answers]) -> None:
    one, two = (a.found["neighbors"] for a in answers)
    assert one["rows"] == two["rows"]
    assert one["same_class_by_rank"] == two["same_class_by_rank"]
    assert one["protocol"] == two["protocol"]
    assert "learned f1 and f2" in one["protocol"]


def test_fine_tuning_is_the_same_to_rounding(answers: tuple[Answers, Answers]) -> None:
    one, two = answers
    with np.load(one.out / "weights.npz") as ours, np.load(two.out / "weights.npz") as theirs:
        assert ours.files == theirs.files
        for name in ours.files:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-4, err_msg=name)
    assert one.found["finetune"]["numbers"] == two.found["finetune"]["numbers"]
    assert one.found["finetune"]["protocol"] == two.found["finetune"]["protocol"]
    assert one.found["finetune"]["skipped"] == two.found["finetune"]["skipped"]


def test_each_result_is_written_once(answers: tuple[Answers, Answers]) -> None:
    for a in answers:
        kinds = [result["kind"] for result in read_results(a.run)]
        assert kinds == ["knn", "linear-cached", "linear-paper", "finetune", "neighbors"]
        left = sorted(path.name for path in (a.run / "evaluation").iterdir())
        assert left == ["features"]


def test_the_command_line_prints_once(answers: tuple[Answers, Answers]) -> None:
    one, _ = answers
    done = start(2, "-m", "snclr", "knn", str(one.run), "--k", "7", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["numbers"] == one.found["knn"]["numbers"]


def test_bad_input_is_said_once(trained: Path) -> None:
    done = start(2, "-m", "snclr", "knn", str(trained), "--test", str(trained))
    assert done.returncode != 0
    assert done.stderr.count("snclr knn: ") == 1
    assert "Traceback" not in done.stderr.split("snclr knn: ")[0]


def test_an_odd_number_of_labels_is_shared_and_a_list_that_cannot_be_written_stops_both(trained: Path) -> None:
    words = ("-m", "snclr", "finetune", str(trained), "--epochs", "1")
    done = start(2, *words, "--labels", "17%", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(done.stdout.splitlines()[-1])
    images = len((trained / record["list"]).read_text().splitlines())
    assert images % 2 == 1
    assert record["settings"]["batch_size"] == images - 1
    in_the_way = trained / "finetune-50pct-seed0.txt"  # of the list
    in_the_way.mkdir()
    done = start(2, *words, "--labels", "50%")
    in_the_way.rmdir()
    assert done.returncode != 0
    assert "snclr finetune: cannot write" in done.stderr
    assert "OSError" not in done.stderr
    assert "IsADirectoryError" not in done.stderr


READERS = [("1", "knn", "--no-cache"), ("40", "finetune", "--labels", "50%", "--epochs", "4")]
"""Which of the images that the second process reads it waits for, and in what."""


@pytest.mark.parametrize("command", READERS, ids=["knn", "finetune"])
def test_what_one_process_cannot_read_ends_both_and_the_first_says_why(trained: Path, command: tuple[str, ...]) -> None:
    image, name, *flags = command
    done = start(2, str(patience_worker.__file__), "unreadable", image, name, str(trained), *flags, timeout=120)
    assert done.returncode == 2, done.stderr[-3000:]
    said = f"snclr {name}: process 1 failed, and all stop with it: the network is away"
    assert done.stderr.count(said) == 1, done.stderr[-3000:]


@pytest.mark.parametrize("command", READERS, ids=["knn", "finetune"])
def test_a_stop_of_one_process_that_waits_for_its_images_stops_both(trained: Path, command: tuple[str, ...]) -> None:
    image, name, *flags = command
    done = start(2, str(patience_worker.__file__), "waiting", image, name, str(trained), *flags, timeout=120)
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
def elsewhere(trained: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Two machines: on the first the run's images are in photos/, on the second there is nothing yet."""
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    shutil.copytree(data_of(trained), here / "photos")
    return here, there


@pytest.mark.parametrize("command", OPENERS, ids=lambda command: command[0])
def test_what_one_process_cannot_open_ends_both_and_the_first_says_why(
    trained: Path, elsewhere: tuple[Path, Path], command: tuple[str, ...]
) -> None:
    here, there = elsewhere
    name, *flags = command
    words = ("apart", str(there), name, str(trained), *flags, "--data", "photos")
    done = start(2, str(patience_worker.__file__), *words, cwd=here, timeout=120)
    assert done.returncode == 2, done.stderr[-3000:]
    said = f"snclr {name}: process 1 failed, and all stop with it: no data set found for 'photos'"
    assert done.stderr.count(said) == 1, done.stderr[-3000:]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [*OPENERS[:1], *OPENERS[2:4]], ids=lambda command: command[0])
def test_processes_that_see_other_images_are_told_so(
    trained: Path, elsewhere: tuple[Path, Path], command: tuple[str, ...]
) -> None:
    here, there = elsewhere
    name, *flags = command
    shutil.copytree(here / "photos", there / "photos")
    next((there / "photos").glob("*/*.png")).unlink()
    words = ("apart", str(there), name, str(trained), *flags, "--data", "photos")
    done = start(2, str(patience_worker.__file__), *words, cwd=here, timeout=120)
    assert done.returncode == 2, done.stderr[-3000:]
    assert done.stderr.count(f"snclr {name}: process 1 sees other ") == 1, done.stderr[-3000:]


def test_processes_that_see_another_run_are_told_so(trained: Path, elsewhere: tuple[Path, Path]) -> None:
    here, there = elsewhere
    shutil.copytree(trained, here / "run")
    tiny_run.train(here / "photos", there / "run", seed=5)
    words = ("apart", str(there), "knn", "run", "--data", str(here / "photos"))
    done = start(2, str(patience_worker.__file__), *words, cwd=here, timeout=120)
    assert done.returncode == 2, done.stderr[-3000:]
    assert done.stderr.count("snclr knn: process 1 sees other weights in run than process 0") == 1, done.stderr[-3000:]


def test_a_stop_of_one_process_that_opens_its_images_stops_both(trained: Path) -> None:
    done = start(2, str(patience_worker.__file__), "opening", "0", "knn", str(trained), timeout=120)
    assert done.returncode == 143, done.stderr[-3000:]
    assert done.stderr.count("stopped by SIGTERM") == 1, done.stderr[-3000:]
    assert "Traceback" not in done.stderr


def test_a_process_that_falls_silent_ends_the_evaluation_and_is_named(trained: Path) -> None:
    done = start(2, str(patience_worker.__file__), "silent", "12", "knn", str(trained), "--no-cache", timeout=120)
    assert done.returncode != 0
    assert "process 1 on " in done.stderr, done.stderr[-3000:]
    assert "has shown no sign of life for 12 seconds" in done.stderr, done.stderr[-3000:]


def test_an_evaluation_does_not_outlive_its_agent(trained: Path) -> None:
    # Its processes hold the pipes that are read here: this comes back when the last of them has gone.
    done = torchrun(2, str(patience_worker.__file__), "deserted", "0", "knn", str(trained), "--no-cache", timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert done.stderr.count("the process that started this one is gone") == 2, done.stderr[-3000:]
