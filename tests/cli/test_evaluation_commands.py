"""The evaluation commands: cached features, stops, neighbors and bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import snclr
from snclr.cli.evaluate import show_accuracy
from snclr.cli.main import main
from snclr.data.datasets.base import open_dataset
from snclr.errors import UserError
from snclr.evaluation import features as extraction
from snclr.evaluation import knn, state
from snclr.evaluation.linear_task import LinearHeads
from snclr.evaluation.results import AccuracyResult, Baseline, read_results
from snclr.evaluation.state import FeatureStore, images_digest
from snclr.methods.snclr.loss import positiveness
from snclr.runtime.stop import StopRequested
from snclr.train.load_run import load_trained_method
from tests.helpers import tiny_run


@pytest.fixture(scope="module")
def trained(images, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    return tiny_run.train(images, out, attention="linear", attention_gradient=True)


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def computed(monkeypatch) -> list[int]:
    """Count the images that pass through a network from now on."""
    plain, counts = extraction._forward, []
    monkeypatch.setattr(
        extraction,
        "_forward",
        lambda net, pixels, *options: counts.append(len(pixels)) or plain(net, pixels, *options),
    )
    return counts


# ---- cached features


def test_the_next_evaluation_reuses_cached_features(run, monkeypatch, tmp_path):
    counts = computed(monkeypatch)
    first = snclr.knn(run, k=5, baselines=False, quiet=True)
    assert sum(counts) == 48
    again = snclr.knn(run, k=5, baselines=False, quiet=True)
    snclr.linear(run, epochs=2, baselines=False, quiet=True)
    assert sum(counts) == 48
    assert replace(again, time=first.time) == first
    snclr.knn(run, k=5, cache=False, baselines=False, quiet=True)
    assert sum(counts) == 96
    snclr.embed(run, out=tmp_path / "a.npz", quiet=True)  # of the whole set: other blocks
    snclr.embed(run, out=tmp_path / "b.npz", quiet=True)
    assert sum(counts) == 144
    with np.load(tmp_path / "a.npz") as a, np.load(tmp_path / "b.npz") as b:
        np.testing.assert_array_equal(a["features"], b["features"])
        assert str(a["metadata"]) == str(b["metadata"])  # the unreadable image is still listed


def test_changed_images_are_recomputed(run, images, tmp_path, monkeypatch):
    data = Path(shutil.copytree(images, tmp_path / "data"))
    before = snclr.embed(run, data=str(data), out=tmp_path / "a.npz", quiet=True)
    Image.new("RGB", (20, 20), (0, 0, 0)).save(data / "red" / "red_0.png")
    counts = computed(monkeypatch)
    after = snclr.embed(run, data=str(data), out=tmp_path / "b.npz", quiet=True)
    assert sum(counts) == 48
    assert before.metadata["fingerprint"] == after.metadata["fingerprint"]  # covers names only, unlike `images_digest`
    with np.load(tmp_path / "a.npz") as a, np.load(tmp_path / "b.npz") as b:
        differ = (a["features"] != b["features"]).any(axis=1)
        assert a["keys"][differ].tolist() == ["red/red_0.png"]


def test_a_damaged_block_is_recomputed(run, monkeypatch, tmp_path):
    first = snclr.knn(run, k=5, quiet=True)
    for path in (run / "evaluation" / "features").rglob("block-*"):
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
    counts = computed(monkeypatch)
    again = snclr.knn(run, k=5, quiet=True)
    assert sum(counts) == 48
    assert again.top1 == first.top1


def test_features_of_outdated_weights_are_deleted(run, images):
    dataset = open_dataset(images)
    old = FeatureStore(run, "encoder", "a" * 64, dataset, 16)
    new = FeatureStore(run, "encoder", "b" * 64, dataset, 16)
    other = FeatureStore(run, "y2", "a" * 64, dataset, 16)
    block = extraction.EncodedBatch(np.arange(3), torch.ones(3, 2), [])
    for store in (old, other, new):
        store.write(0, np.arange(3), block, lambda text: pytest.fail(text))
    assert old.read(0, np.arange(3)) is None
    assert not old.folder.exists()
    for store in (other, new):
        assert torch.equal(store.read(0, np.arange(3)).features, torch.ones(3, 2))


def test_a_full_disk_disables_the_cache_only(run, monkeypatch, capsys):
    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("snclr.evaluation.state.write_atomic", full)
    assert snclr.knn(run, k=5).top1 is not None
    assert "features are not cached" in capsys.readouterr().err


def test_the_digest_of_images_changes_with_the_files(images, tmp_path):
    data = Path(shutil.copytree(images, tmp_path / "data"))
    dataset, ids = open_dataset(data), np.arange(4)
    before = images_digest(dataset, ids)
    os.utime(data / dataset.key(3), (1, 1))
    assert images_digest(dataset, ids) != before
    assert images_digest(dataset, ids[:3]) == images_digest(open_dataset(images), ids[:3])  # copied with its times


# ---- stops


def stop_after(monkeypatch, owner, name: str, calls: int, number: signal.Signals = signal.SIGINT) -> None:
    plain, done = getattr(owner, name), []

    def wrapped(*arguments, **options):
        done.append(1)
        if len(done) == calls:
            os.kill(os.getpid(), number)
        return plain(*arguments, **options)

    monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.parametrize("command", ["knn", "linear", "finetune", "embed", "neighbors", "search", "report"])
def test_a_stop_ends_retries_of_an_unreachable_server(run, images, tmp_path, capsys, command):
    with socket.socket() as unused:  # bound, so that the port stays free, but not listening
        unused.bind(("127.0.0.1", 0))
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        flags = {"embed": ["--out", str(tmp_path / "f.npz")], "search": [str(next(images.glob("*/*.png")))]}
        argv = [command, str(run), *flags.get(command, []), f"--data=http://127.0.0.1:{unused.getsockname()[1]}/0.tar"]
        assert main(argv) == 143
        timer.join()
    stderr = capsys.readouterr().err
    assert "stopped by SIGTERM" in stderr
    assert f"  snclr {command} {run}" in stderr


def test_a_stopped_extraction_continues_after_its_last_block(run, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(extraction, "BLOCK", 16)
    snclr.embed(run, out=tmp_path / "whole.npz", cache=False, quiet=True)
    argv = ["embed", str(run), "--out", str(tmp_path / "f.npz")]
    with monkeypatch.context() as patch:
        stop_after(patch, extraction, "_forward", 3)
        assert main(argv) == 130
    assert not (tmp_path / "f.npz").exists()
    err = capsys.readouterr().err
    assert "stopped by SIGINT; everything is saved" in err
    counts = computed(monkeypatch)
    assert main(["embed", *err.split("Continue with:\n  snclr embed ")[1].split()]) == 0
    assert sum(counts) == 48 - 2 * 16  # two blocks were complete
    with np.load(tmp_path / "whole.npz") as a, np.load(tmp_path / "f.npz") as b:
        np.testing.assert_array_equal(a["features"], b["features"])


@pytest.mark.parametrize(
    ("command", "calls"), [("linear", 8), ("linear", 27), ("linear --protocol=paper", 4), ("linear --lr=0.1", 3)]
)
def test_a_stopped_classifier_continues_with_the_same_result(run, monkeypatch, capsys, command, calls):
    """Steps 8 and 27 of the cached protocol are in its two trainings (2 × 10 epochs of 2 steps)."""
    argv = [*command.split(), str(run), "--epochs=10", "--batch-size=24", "--json"]
    assert main(argv) == 0
    undisturbed = json.loads(capsys.readouterr().out)
    steps: list[int] = []
    plain = LinearHeads.step
    monkeypatch.setattr(LinearHeads, "step", lambda self, *a: steps.append(1) or plain(self, *a))
    assert main(argv) == 0
    whole = len(steps)
    capsys.readouterr()
    steps.clear()
    with monkeypatch.context() as patch:
        stop_after(patch, LinearHeads, "step", calls, signal.SIGTERM)
        assert main(argv) == 143
    stopped = json.loads(capsys.readouterr().out)
    assert stopped["complete"] is False
    assert len(read_results(run)) == 2
    assert main(argv) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(steps) == whole  # nothing is done twice
    assert {**result, "time": None} == {**undisturbed, "time": None}
    assert sorted(path.name for path in (run / "evaluation").iterdir()) == ["baselines", "features"]


def test_stopped_votes_continue_with_the_same_result(run, monkeypatch):
    monkeypatch.setattr("snclr.evaluation.knn._VOTE_ROWS", 2)
    undisturbed = snclr.knn(run, k=5, quiet=True)
    with monkeypatch.context() as patch:
        stop_after(patch, knn, "_vote", 3)
        with pytest.raises(StopRequested) as stopped:
            snclr.knn(run, k=5, quiet=True)
    assert stopped.value.exit_code == 130
    votes = []
    plain = knn._vote
    monkeypatch.setattr(knn, "_vote", lambda *args: votes.append(1) or plain(*args))
    assert snclr.knn(run, k=5, quiet=True).top1 == undisturbed.top1
    assert len(votes) == 1  # of four blocks, three were voted on before the stop


def test_concurrent_evaluations_are_rejected(run, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop_after(patch, LinearHeads, "step", 3)
        assert main(["linear", str(run)]) == 130
    (folder,) = (run / "evaluation").glob("linear-cached-*")
    from snclr.io.locking import FileLock

    lock = FileLock(folder / ".lock")
    assert lock.acquire()
    try:
        assert main(["linear", str(run)]) == 2
    finally:
        lock.release()
    assert "already running" in capsys.readouterr().err
    assert main(["linear", str(run)]) == 0


def test_the_state_of_another_evaluation_is_ignored(tmp_path):
    settings = {"epochs": 1, "rates": (1, 2)}
    state.EvalState(tmp_path, "linear", settings).save("probe", 3, {"w": torch.ones(1)})
    assert state.EvalState(tmp_path, "linear", settings).load("probe", "cpu", quiet=True).step == 3
    assert state.EvalState(tmp_path, "linear", {**settings, "epochs": 2}).load("probe", "cpu", quiet=True) is None


def test_the_other_ranks_do_not_need_a_state_that_rank_0_has_deleted(tmp_path, monkeypatch):
    def stop(saved: state.EvalState) -> None:
        with saved:
            shutil.rmtree(saved.folder)
            monkeypatch.setattr(state, "rank_and_size", lambda: (1, 2))
            raise StopRequested(signal.SIGTERM)

    with pytest.raises(StopRequested):
        stop(state.EvalState(tmp_path, "linear", {}))


# ---- neighbors


def test_neighbors_of_an_image_are_weighted_as_in_training(run, images, capsys):
    query = images / "red" / "red_3.png"
    assert main(["neighbors", str(run), str(query), "--candidates", str(images), "--k", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (row,) = result["rows"]
    assert row["label"] == "red"  # the same file is in the folder, with a class
    assert [Path(one["path"]).is_file() for one in row["neighbors"]] == [True] * 4
    assert "red/red_3.png" not in [one["key"] for one in row["neighbors"]]
    assert Path(result["figure"]).is_file()
    assert json.loads(Path(result["table"]).read_text())["rows"] == result["rows"]

    method, config = load_trained_method(run)
    with torch.no_grad():  # make f1 and f2 matter, and check against Eq. 4 by hand
        dataset = open_dataset(images)
        index = [dataset.key(i) for i in range(len(dataset))].index("red/red_3.png")
        kept = [i for i in range(len(dataset)) if "broken" not in dataset.key(i)]
        view = torch.stack([_view(dataset, i, config.image_size) for i in kept])
        y2 = F.normalize(method.target_network(view), dim=1)
        y1 = F.normalize(method.projector(method.encoder(view)), dim=1)
        row_number = kept.index(index)
        cosine = y2 @ y2[row_number]
        cosine[row_number] = -2
        best = cosine.topk(config.neighbors).indices  # the K of training, of which four are shown
        assert config.neighbors == 5
        w = positiveness(
            method.criterion.f1(y1[row_number : row_number + 1]), method.criterion.f2(y2[best])[None],
            gamma=config.gamma, temperature=config.attention_temperature,
        )[0, :4]  # fmt: skip
        best = best[:4]
    expected = sorted(zip(w.tolist(), cosine[best].tolist(), best.tolist(), strict=True), reverse=True)
    assert [one["key"] for one in row["neighbors"]] == [dataset.key(kept[i]) for _, _, i in expected]
    assert [one["w"] for one in row["neighbors"]] == pytest.approx([value for value, _, _ in expected], abs=1e-4)
    assert [one["cosine"] for one in row["neighbors"]] == pytest.approx([value for _, value, _ in expected], abs=1e-4)
    assert f"a softmax over the {config.neighbors} nearest neighbors" in result["weights"]


def _view(dataset, index: int, size: int) -> torch.Tensor:
    from snclr.data.transforms.crop import center_crop
    from snclr.data.transforms.views import normalize

    return normalize(torch.from_numpy(np.ascontiguousarray(center_crop(dataset.load(index), size)))[None], "cpu")[0]


def test_queue_neighbors_are_named_by_training_images(run, images, tmp_path):
    shutil.copy(images / "blue" / "blue_1.png", tmp_path / "mine.png")
    result = snclr.neighbors(run, [tmp_path / "mine.png", "red/red_2.png"], candidates="queue", k=10, quiet=True)
    mine, by_key = result.rows
    assert (mine.key, by_key.key, by_key.label) == ("mine.png", "red/red_2.png", "red")
    assert all((images / one.key).is_file() for row in result.rows for one in row.neighbors)
    assert len(mine.neighbors) == 10
    assert "red/red_2.png" not in [one.key for one in by_key.neighbors]
    assert "queue, 40 features" in result.protocol
    assert not read_results(run)  # of single images: no measurement of the run
    whole = snclr.neighbors(run, candidates="queue", k=3, quiet=True)
    assert whole.queries == 48
    assert all(row.key not in [one.key for one in row.neighbors] for row in whole.rows)


def test_a_copy_of_the_folder_is_a_different_gallery(run, images, tmp_path):
    copied = Path(shutil.copytree(images, tmp_path / "copy"))
    result = snclr.neighbors(run, data=str(images), candidates=str(copied), k=1, quiet=True)
    assert {row.key for row in result.rows} == {row.neighbors[0].key for row in result.rows}
    assert all(row.neighbors[0].cosine == pytest.approx(1.0, abs=1e-5) for row in result.rows)
    again = snclr.neighbors(run, data=str(images), candidates=str(images), k=1, quiet=True)
    assert not any(row.key == row.neighbors[0].key for row in again.rows)


def test_shares_by_rank_are_recorded(run):
    result = snclr.neighbors(run, k=2, rows=3, quiet=True)
    (record,) = read_results(run, "neighbors")
    assert list(record["numbers"].values()) == result.neighbor_purity
    assert record["protocol"] == result.protocol
    assert len(result.rows) == 3
    assert len(json.loads((run / "figures" / "neighbors.json").read_text())["rows"]) == 3


def test_other_methods_and_exported_encoders_are_compared_by_encoder_features(run, images, tmp_path, capsys):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("encoder.safetensors", "config.json"):
        shutil.copy(run / name, bare)
    result = snclr.neighbors(bare, data=str(images), k=3, quiet=True)
    assert "the encoder's features" in result.protocol
    assert all(row.neighbors[0].w == 1.0 for row in result.rows)
    rival = tiny_run.train(images, tmp_path / "simclr", method="simclr", neighbors=None, queue_length=None)
    result = snclr.neighbors(rival, k=3, quiet=True)
    assert "the run's method is simclr" in result.protocol
    assert result.weights is None
    assert main(["neighbors", str(rival), "red/red_1.png", "--k=2"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("  cosine ") == 2
    assert json.loads(Path(rival, "figures/neighbors-red_1.json").read_text())["protocol"].endswith("; 1 query image")
    assert "neighbor purity" not in printed  # of one image
    assert "  w " not in printed  # the loss of simclr has no w
    with pytest.raises(UserError, match="no queue"):
        snclr.neighbors(rival, candidates="queue", quiet=True)
    queued = tiny_run.train(images, tmp_path / "nnclr", method="nnclr", neighbors=None)
    result = snclr.neighbors(queued, "red/red_1.png", candidates="queue", k=3, quiet=True)
    assert "nnclr run's key projections" in result.protocol
    assert len(result.rows[0].neighbors) == 3


# ---- bad input


@pytest.fixture(scope="module")
def bad(images, trained, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bad")
    one = root / "one-class" / "red"
    shutil.copytree(images / "red", one)
    shutil.copytree(images / "red", root / "flat")
    (root / "empty").mkdir()
    (root / "unfinished").mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        shutil.copy(trained / name, root / "unfinished")
    unfit = Path(shutil.copytree(trained, root / "unfit"))
    config = json.loads((unfit / "config.json").read_text())
    config["snclr"]["encoder"]["name"] = "resnet18"
    (unfit / "config.json").write_text(json.dumps(config))
    (root / "unknown.txt").write_text("red/nowhere.png\tred\nblue/nothing.png\tblue\n")
    return {path.stem: path for path in root.iterdir()} | {"root": root}


def arguments(command: str, run: Path) -> list[str]:
    more = {"embed": ["--out", "{bad}/f.npz"], "search": ["red/red_1.png"], "explain": ["red/red_1.png"]}
    name, *flags = command.split()
    return [name, str(run), *more.get(name, []), *flags]


EVERY = ["knn", "linear", "linear --protocol=paper", "finetune", "neighbors", "embed", "search", "explain"]


NO_RUNS = {"empty": "run", "missing": "run", "unfinished": "pretrain --resume", "unknown": "run"}
OF_THE_CHECKPOINT = ("neighbors", "explain")  # the others take the exported encoder, which may not fit its description


@pytest.mark.parametrize(
    ("command", "folder", "message"),
    [
        *((command, folder, message) for command in EVERY for folder, message in NO_RUNS.items()),
        *((command, "unfit", "encoder") for command in EVERY if command not in OF_THE_CHECKPOINT),
    ],
)
def test_an_invalid_run_exits_with_code_2(bad, command, folder, message, capsys):
    path = bad.get(folder, bad["root"] / folder)
    argv = [part.format(bad=bad["root"]) for part in arguments(command, path)]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"snclr {command.split()[0]}: ")
    assert message in err
    assert str(path) in err or path.name in err


@pytest.mark.parametrize("sub", ["test", "a/b", ""])
def test_class_folders_below_one_subfolder_are_suggested(run, images, sub, tmp_path, capsys):
    folder = tmp_path / "labeled"
    shutil.copytree(images if sub else images / "red", folder / sub)
    shutil.copy(images / "red" / "red_1.png", folder / "top.png")
    assert main(["knn", str(run), "--data", str(folder)]) == 2
    hint = f" (did you mean '{folder / sub}'?)" if sub else ""
    assert f"({folder}) have no labels{hint}. To label them" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["knn", "linear", "linear --protocol=paper", "finetune"])
@pytest.mark.parametrize(
    ("data", "message"),
    [("one-class", "one class"), ("flat", "no labels"), ("unknown", "unknown.txt"), ("empty", "no images")],
)
def test_unsuitable_data_exits_with_code_2(run, bad, command, data, message, capsys):
    assert main([*arguments(command, run), "--data", str(bad[data])]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert not read_results(run)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["knn", "{run}", "--devices", "none"], "--devices must be auto or a number of at least 1, not 'none'"),
        (["knn", "{run}", "--devices", "0"], "--devices must be auto or a number of at least 1, not '0'"),
        (["linear", "{run}", "--nodes", "0"], "nodes is 0"),
        (["knn", "{run}", "--k", "0"], "--k must be at least 1, not 0"),
        (["knn", "{run}", "--device", "meta"], "there is no device 'meta'; choose auto, cpu"),
        (["neighbors", "{run}", "--device", "xla"], "there is no device 'xla'"),
        (["explain", "{run}", "red/red_1.png", "--device", "mps:3"], "there is no device 'mps:3'"),
        (["linear", "{run}", "--device", "cuda:99"], "there is no device 'cuda:99'"),
        (["neighbors", "{run}", "--rows", "0"], "--rows must be at least 1, not 0"),
        (["neighbors", "{run}", "--out", "a.gif"], ".png"),
        (["neighbors", "{run}", "nowhere.png"], "nowhere.png"),
        (["neighbors", "{run}", "--candidates", "nowhere"], "nowhere"),
        (["neighbors", "{run}", "{broken}"], "cannot be read"),
    ],
)
def test_invalid_flags_exit_with_code_2(run, images, argv, message, capsys):
    broken = images / "red" / "broken.png"
    assert main([part.format(run=run, broken=broken) for part in argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("classes", "chance", "shown"),
    [
        (6, 1 / 6, "chance 16.7% (1/6)"),
        (10, 0.1, "chance 10.0% (1/10), of top-5 50.0% (5/10)"),
        (20, 0.3, "chance 30.0% (largest class), of top-5 at least 25.0% (5/20)"),
    ],
)
def test_top5_is_printed_with_its_chance_from_ten_classes_on(classes, chance, shown, capsys):
    result = AccuracyResult(
        kind="linear-cached", time="", top1=0.5, top5=0.9, n=100, standard_error=0.05, classes=classes, chance=chance,
        protocol="", data="", baselines={"raw_pixels": Baseline(0.4, 0.8, 0.05)}, warnings=[], unlabeled=0, skipped=0,
    )  # fmt: skip
    show_accuracy(result)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f"; {shown}")
    assert [("top-5 90.0%" in lines[1]), ("top-5 80.0%" in lines[2])] == [classes >= 10] * 2
    assert result.to_dict()["numbers"]["top5"] == 0.9
