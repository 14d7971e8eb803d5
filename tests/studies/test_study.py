"""Studies with fake worker processes: runs, records, tables and files."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from snclr.api.compare import ablate, compare
from snclr.cli.main import main
from snclr.errors import UserError
from snclr.reports.figures import comparison as comparison_figure
from snclr.runtime.stop import StopRequested
from snclr.studies import runner
from snclr.studies.conditions import TUNE_SEED
from snclr.studies.records import downsample_metrics, write_record
from tests.helpers import tiny_run

WHERE = {"device": "a processor", "threads": 1, "jobs": 1}


class Workers:
    """Stands in for `start_worker`: a run ends at once with a record made from its settings, or fails."""

    def __init__(self) -> None:
        self.started: list[dict] = []
        self.failing = lambda settings: False

    def __call__(self, job: Path, log: Path) -> Finished:
        job = json.loads(job.read_text())
        self.started.append(job)
        if self.failing(job["settings"]):
            log.write_text("Traceback\nMemoryError: too large\n")
            return Finished(1)
        cost = {"seconds": 10.0 + job["settings"]["seed"] % 10, "peak_mb": 100.0, "memory": "process", "queue_mb": 0.5}
        record = {
            "schema": 1, "key": job["key"], "settings": job["settings"], "data": job["data"], "cost": cost,
            "numbers": numbers(job), "protocols": {"knn": "kNN: by votes"}, "where": WHERE,
            "series": {"step": [1, 2, 3], "epoch": [0.5, 1.0, 2.0], "neighbor_purity": [None, 0.2, 0.4]},
        }  # fmt: skip
        write_record(record, Path(job["record"]))
        return Finished(0)


class Finished:
    stdin = None

    def __init__(self, returncode: int) -> None:
        self.returncode = returncode

    def poll(self) -> int:
        return self.returncode

    def terminate(self) -> None:
        pass


def numbers(job: dict) -> dict[str, float]:
    s = job["settings"]
    if job["evaluation"]["kind"] == "cost":
        return {"seconds_per_step": 0.1 + s["queue_length"] / 1e6}
    better = 0.05 + s["seed"] % 7 * 0.0005 if s.get("sides") == "both" else 0.0
    knn = 0.6 + better + s["seed"] % 7 * 0.001 - abs(s["lr"] - 0.03)
    return {"knn": knn} if job["evaluation"]["kind"] == "validation" else {"knn": knn, "linear": knn + 0.02}


@pytest.fixture
def figures() -> None:
    """Tests with this fixture draw the figures; others are faster without."""


@pytest.fixture
def workers(monkeypatch, request) -> Workers:
    made = Workers()
    monkeypatch.setattr(runner, "start_worker", made)
    if "figures" not in request.fixturenames:
        monkeypatch.setattr(comparison_figure, "draw_comparison", lambda *_: None)
        monkeypatch.setattr(comparison_figure, "draw_neighbor_purity", lambda *_: False)
    return made


@pytest.fixture
def common(images, tmp_path) -> dict:
    return {
        "data": str(images),
        "out": tmp_path / "out",
        "recipe": "demo",
        "batch_size": 16,
        "epochs": 2,
        "quiet": True,
    }


TWO = "snclr,snclr:sides=neither"


def test_every_row_and_seed_is_one_run(workers, common):
    result = compare(methods=TWO, seeds=3, **common)
    assert result.exit_code == 0
    trained = [(job["settings"]["sides"], job["settings"]["seed"]) for job in workers.started]
    assert trained == [(side, seed) for seed in range(3) for side in ("both", "neither")]
    one = {json.dumps({**job["settings"], "sides": "", "seed": 0}) for job in workers.started}
    assert len(one) == 1  # nothing else differs
    first, second = result.table["rows"]
    assert first["knn"]["mean"] - second["knn"]["mean"] == pytest.approx(0.0505)
    assert second["knn_difference"]["by_seed"] == pytest.approx({0: -0.05, 1: -0.0505, 2: -0.051})
    assert second["linear_difference"]["verdict"] == "lower"
    assert first["seconds"]["mean"] == pytest.approx(11)
    assert first["neighbor_purity"]["mean"] == pytest.approx(0.4)


def test_the_protocol_lists_how_the_rows_differ(workers, common):
    methods = "mocov3:temperature=0.1,snclr,snclr:gamma=max,neighbors=3,snclr:weights=hard"
    result = compare(methods=methods, seeds=1, **common)
    [line] = [line for line in result.table["protocol"] if line.startswith("rows differ in: ")]
    parts = dict(part.split(": ", 1) for part in line.removeprefix("rows differ in: ").split("; "))
    assert list(parts) == ["mocov3:temperature=0.1", "snclr", "snclr:gamma=max,neighbors=3", "snclr:weights=hard"]
    assert "momentum_schedule=cosine" in parts["mocov3:temperature=0.1"]
    assert "neighbors=10" in parts["snclr"]
    assert parts["snclr:gamma=max,neighbors=3"] == "as snclr, but neighbors=3, gamma=max"
    assert parts["snclr:weights=hard"] == "as snclr, but neighbor_weights=hard"


def test_finished_runs_are_not_repeated(workers, common):
    compare(methods=TWO, seeds=2, **common)
    assert len(workers.started) == 4
    again = compare(methods=TWO, seeds=2, **{**common, "workers": 5})
    assert len(workers.started) == 4
    assert [row["seeds"] for row in again.table["rows"]] == [[0, 1], [0, 1]]
    compare(methods=TWO + ",snclr:weights=hard", seeds=3, **common)  # a row and a seed more
    assert len(workers.started) == 4 + 2 + 3
    compare(methods=TWO, seeds=2, **{**common, "epochs": 3})  # other settings are other runs
    assert len(workers.started) == 13


def test_moved_data_is_recognized(workers, common, images, tmp_path):
    compare(methods="snclr", seeds=1, **common)
    tiny_run.write_images(tmp_path / "fewer" / "train", each=10)
    tiny_run.write_images(tmp_path / "fewer" / "test", each=4)
    compare(methods="snclr", seeds=1, **{**common, "data": str(tmp_path / "fewer")})
    (tmp_path / "link").symlink_to(images)
    compare(methods="snclr", seeds=1, **{**common, "data": str(tmp_path / "link")})
    assert len(workers.started) == 2


def test_a_damaged_record_is_recomputed(workers, common, caplog):
    compare(methods="snclr", seeds=1, **common)
    (record,) = (common["out"] / "results" / "runs").glob("*.json")
    record.write_text(record.read_text()[:100])
    compare(methods="snclr", seeds=1, **common)
    assert len(workers.started) == 2
    assert "cannot read" in caplog.text


def test_a_failed_run_is_reported_and_the_others_continue(workers, common):
    workers.failing = lambda s: s["sides"] == "neither" and s["seed"] == 0
    result = compare(methods=TWO, seeds=2, **common)
    assert result.exit_code == 1
    assert len(workers.started) == 4
    ((title, reason),) = result.failed.items()
    assert title == "snclr:sides=neither, seed 0"
    assert "MemoryError: too large" in reason
    assert result.table["rows"][1]["missing"] == [0]
    assert any("not finished" in note for note in result.table["notes"])
    workers.failing = lambda s: False
    assert compare(methods=TWO, seeds=2, **common).exit_code == 0
    assert len(workers.started) == 5  # that one alone


def test_tuning_is_equal_for_all_rows_and_uses_no_test_images(workers, common):
    result = compare(methods=TWO, seeds=1, tune=["lr=0.01,0.03,0.1"], **common)
    trials = [job for job in workers.started if job["evaluation"]["kind"] == "validation"]
    assert [(j["settings"]["sides"], j["settings"]["lr"]) for j in trials] == [
        (side, lr) for side in ("both", "neither") for lr in (0.01, 0.03, 0.1)
    ]
    assert {job["settings"]["seed"] for job in trials} == {TUNE_SEED}
    finals = [job for job in workers.started if job["evaluation"]["kind"] == "test"]
    assert [job["settings"]["lr"] for job in finals] == [0.03, 0.03]
    assert result.table["rows"][0]["tuned"] == {"lr": 0.03}
    assert any("the same 3 trials per row (lr in {0.01, 0.03, 0.1})" in line for line in result.table["protocol"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"methods": "snclr:lr=1", "tune": ["lr=1,2"]}, "leave one of them out"),
        ({"methods": "byol", "neighbors": 5}, "none of the methods .byol. uses neighbors"),
        ({"methods": "snclr", "seeds": "1000001,", "tune": ["lr=1,2"]}, "is used for tuning"),
        ({"budget": "epochs"}, "--budget must be one of steps, images, seconds"),
        ({"budget": "seconds=soon"}, "positive number"),
        ({"coco": "somewhere"}, "studies that measure detection"),
        ({"study": "table-9"}, "there is no study 'table-9'"),
        ({"seed": 1}, "use --seeds"),
        ({"method": "snclr"}, "use --methods"),
        ({"resume": True}, "continues the study"),
        ({"jobs": 0}, "--jobs"),
        ({"data": ""}, "data is missing"),
        ({"epoch": 3}, "did you mean 'epochs'"),
        ({"device": "cpu", "precision": "bf16"}, "precision bf16 is not supported on CPUs"),
    ],
)
def test_invalid_input_is_rejected_before_anything_runs(workers, common, more, message):
    with pytest.raises(UserError, match=message):
        compare(**{"methods": "snclr", "seeds": 1, **common, **more})
    assert not workers.started


def test_unlabeled_images_are_rejected(workers, common, tmp_path):
    for number in range(20):
        (tmp_path / "plain").mkdir(exist_ok=True)
        Image.new("RGB", (16, 16)).save(tmp_path / "plain" / f"{number}.png")
    with pytest.raises(UserError, match="have no labels"):
        compare(methods="snclr", seeds=1, **{**common, "data": str(tmp_path / "plain")})


def test_a_note_states_that_test_images_were_seen(workers, common, images):
    result = compare(methods="snclr", seeds=1, **{**common, "data": str(images / "train")})
    assert any("seen in pre-training" in note for note in result.table["notes"])


def test_supervised_methods_need_a_test_split(workers, common, images):
    with pytest.raises(UserError, match="labels of the test images"):
        compare(methods="snclr,supervised", seeds=1, **{**common, "data": str(images / "train")})
    compare(methods="snclr,supervised", seeds=1, **common)
    assert len(workers.started) == 2


@pytest.mark.parametrize("variant", ["same", "linked", "copied", "test", "part"])
def test_the_training_images_under_another_path_are_recognized(workers, common, images, tmp_path, variant):
    data = images / "train"
    (tmp_path / "linked").symlink_to(data)
    shutil.copytree(data, tmp_path / "copied")
    named = {
        "same": {"eval_data": str(data)}, "linked": {"eval_data": str(tmp_path / "linked")},
        "copied": {"eval_data": str(tmp_path / "copied")},
        "test": {"eval_data": str(images / "test"), "test": str(data)},
        "part": {"eval_data": str(images)},
    }[variant]  # fmt: skip
    given = {**common, "data": str(tmp_path / "all" if variant == "part" else data), **named}
    if variant == "part":  # trained on a folder that has the test images too
        (tmp_path / "all").mkdir()
        for part in ("train", "test"):
            for path in (images / part).rglob("*.png"):
                name = tmp_path / "all" / path.parent.name / f"{part}-{path.name}"
                name.parent.mkdir(exist_ok=True)
                name.hardlink_to(path)
    with pytest.raises(UserError, match="would learn from the labels of the test images"):
        compare(methods="snclr,supervised", seeds=1, **given)
    assert not workers.started
    assert any("seen in pre-training" in note for note in compare(methods="snclr", seeds=1, **given).table["notes"])


def test_other_images_with_the_same_names_are_a_test_set(workers, common, images, tmp_path):
    tiny_run.write_images(tmp_path / "other", seed=9)
    given = {**common, "data": str(images / "train"), "eval_data": str(tmp_path / "other")}
    result = compare(methods="snclr,supervised", seeds=1, **given)
    assert len(workers.started) == 2
    assert not any("seen in pre-training" in note for note in result.table["notes"])


@pytest.mark.parametrize("name", ["a/b", "../up", "a\\b", ".hidden", "a\nb", "x" * 300])
def test_invalid_study_names_are_rejected(workers, common, name):
    for study in (compare, functools.partial(ablate, table="sides")):
        with pytest.raises(UserError, match="is not a valid file name"):
            study(seeds=1, name=name, **common)
    assert not workers.started
    assert not common["out"].exists()


def test_unwritable_folders_are_rejected_before_anything_runs(workers, common, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="another --results folder"):
        compare(methods="snclr", seeds=1, results=tmp_path / "file" / "results", **common)
    with pytest.raises(UserError, match="give the name of a folder"):
        compare(methods="snclr", seeds=1, **{**common, "out": tmp_path / "file"})
    assert not workers.started
    assert compare(methods="snclr", seeds=1, **common).exit_code == 0  # nothing is left locked


@pytest.mark.parametrize(("k", "noted"), [(200, True), (2, False), ("auto", False)])
def test_a_k_above_the_smallest_class_is_noted(workers, common, k, noted):
    result = compare(methods="snclr", seeds=1, k=k, **common)
    assert [job["evaluation"]["k"] for job in workers.started] == [k]
    assert any("--k auto chooses k as `snclr knn` does" in note for note in result.table["notes"]) == noted


def test_a_common_setting_reaches_the_methods_that_use_it(workers, common):
    result = compare(methods="snclr,byol", seeds=1, neighbors=7, **common)
    first, second = (job["settings"] for job in workers.started)
    assert first["neighbors"] == 7
    assert "neighbors" not in second
    assert any("snclr:" in line and "neighbors=7" in line for line in result.table["protocol"])


def test_records_contain_no_local_paths(workers, common, images, tmp_path):
    compare(methods=TWO, seeds=1, **common)
    kept = [*(common["out"] / "results").rglob("*.json"), common["out"] / "compare.md", common["out"] / "compare.json"]
    assert len(kept) == 5
    assert not [path for path in kept if str(images.parent) in path.read_text() or str(tmp_path) in path.read_text()]


# ---- the five tables


def test_tables_share_runs(workers, common):
    ablate(table="positiveness", seeds=1, **common)
    assert len(workers.started) == 3
    ablate(table="sides", seeds=1, **common)
    assert len(workers.started) == 3 + 2  # neither and both are there
    study = json.loads((common["out"] / "results/studies/ablate-sides.json").read_text())
    assert [row["label"] for row in study["rows"]] == ["no neighbors", "positives only", "negatives only", "both"]


def test_the_table_of_costs(workers, common):
    result = ablate(table="cost", values="20,40", seeds=2, steps=3, **common)
    assert {job["evaluation"]["kind"] for job in workers.started} == {"cost"}
    assert [row["label"] for row in result.table["rows"]] == ["no neighbors", "Q = 20", "Q = 40"]
    text = Path(result.files["markdown"]).read_text()
    assert "| Q = 40 | 0.50 | 100.0 ± 0.0 | +0.0 | 0.1000 ± 0.0000 | +0.0% |" in text


# ---- what a person sees


def test_the_command_prints_tables_and_files(workers, figures, common, capsys, images):
    argv = ["compare", "--methods", TWO, "--seeds", "3", "--data", str(images), "--out", str(common["out"])]
    argv += ["--recipe", "demo", "--batch-size", "16", "--epochs", "2"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "62.55 ± 0.15" in text
    assert "57.50 ± 0.10" in text
    assert "-5.05 ± 0.05  -5.17 to -4.93  lower" in re.sub(r" {2,}", "  ", text)
    for name in ("compare.md", "compare.json", "compare.png", "compare-purity.png"):
        assert (common["out"] / name).stat().st_size > 100, name
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["seeds"] == [0, 1, 2]


def test_a_dry_run_writes_nothing(workers, common, capsys, images):
    argv = ["ablate", "--table", "sides", "--seeds", "2", "--data", str(images), "--out", str(common["out"])]
    assert main([*argv, "--dry-run", "--recipe", "demo", "--batch-size", "16"]) == 0
    text = capsys.readouterr().out
    assert text.count("to train  ") == 8
    assert re.search(r"to train: about \d+:\d\d:\d\d \(", text)
    assert not common["out"].exists()
    assert len(workers.started) == 1  # the few steps it estimates from


def test_a_stop_of_a_dry_run_is_no_failed_measurement(workers, common):
    workers.failing = lambda settings: os.kill(os.getpid(), signal.SIGINT) or True
    with pytest.raises(StopRequested):
        compare(methods="snclr", dry_run=True, **common)


def test_a_dry_run_of_untrained_rows_takes_no_time(workers, common):
    estimate = compare(methods="random", dry_run=True, **common)
    assert (estimate.seconds, estimate.how) == (0.0, "nothing is left to train")
    assert not workers.started


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_row_with_too_many_neighbors_is_refused_before_anything_is_trained(workers, common, dry_run):
    with pytest.raises(UserError, match="neighbors=1000 must be below the number of images"):
        compare(methods="snclr,snclr:neighbors=1000", dry_run=dry_run, **common)
    assert not workers.started


def test_a_second_comparison_in_the_same_folder_is_rejected(workers, common):
    from snclr.io.locking import FileLock

    common["out"].mkdir()
    lock = FileLock(common["out"] / ".snclr-compare.lock")
    assert lock.acquire()
    with pytest.raises(UserError, match="another comparison is already running"):
        compare(methods="snclr", seeds=1, **common)
    lock.release()


def test_long_series_are_averaged():
    lines = [{"step": s, "epoch": s / 10, "loss": float(s), "neighbor_purity": 0.5} for s in range(1, 1001)]
    series = downsample_metrics([{"step": 0, "epoch": 0.0, "loss": None}, *lines], points=50)
    assert len(series["loss"]) == 50
    assert series["step"][-1] == 1000
    assert sum(series["loss"]) / 50 == pytest.approx(500, abs=1)


# ---- real processes, without torch


SLEEPER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
open(sys.argv[1], "w").close()
time.sleep(600)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_terminates_the_runs_and_the_same_command_continues(monkeypatch, common, tmp_path, number, code):
    started = []

    def start(job: Path, log: Path) -> subprocess.Popen[bytes]:
        mark = tmp_path / f"started-{len(started)}"
        command = [sys.executable, "-c", SLEEPER, str(mark)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        while not mark.exists():
            assert process.poll() is None
        started.append(process)
        os.kill(os.getpid(), number)
        return process

    monkeypatch.setattr(runner, "start_worker", start)
    with pytest.raises(StopRequested) as stop:
        compare(methods=TWO, seeds=2, **common)
    assert stop.value.exit_code == code
    assert [process.returncode for process in started] == [143]
    workers = Workers()
    monkeypatch.setattr(runner, "start_worker", workers)
    assert compare(methods=TWO, seeds=2, **common).exit_code == 0
    assert len(workers.started) == 4


# ---- the page of results


def script():
    path = Path(__file__).resolve().parents[2] / "scripts" / "build_results.py"
    spec = importlib.util.spec_from_file_location("build_results", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_results_page_is_rebuilt_from_the_records(workers, figures, common, tmp_path, capsys):
    compare(methods=TWO, seeds=2, **common)
    page = tmp_path / "docs" / "results.md"
    page.parent.mkdir()
    marks = "".join(f"<!-- {m} -->\nold\n<!-- end -->\n\n" for m in ("table: compare", "figure: compare", "cost"))
    page.write_text(f"# Results\n\n{marks}Text that stays.\n")
    flags = ["--results", str(common["out"] / "results"), "--page", str(page)]
    assert script().main([*flags, "--check"]) == 1
    assert script().main(flags) == 0
    text = page.read_text()
    assert "| snclr:sides=neither | 57.45 ± 0.07 | 59.45 ± 0.07 |" in text
    assert "old" not in text
    assert "Text that stays." in text
    assert "| compare | 4 | 0.01 |" in text
    assert "snclr compare --methods snclr,snclr:sides=neither --seeds 2 --data" in text
    assert (page.parent / "figures" / "compare.png").stat().st_size > 100
    assert script().main([*flags, "--check"]) == 0
    page.write_text(text.replace("table: compare", "table: nothing"))
    assert script().main(flags) == 2
    assert "studies: compare" in capsys.readouterr().err
