"""Accuracies come with n, standard error, chance level, baselines and warnings."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import nn

import snclr
from snclr.cli.main import main
from snclr.data.datasets.base import ArrayDataset, open_dataset
from snclr.data.splits import open_splits, take
from snclr.evaluation import features as extraction
from snclr.evaluation.features import extract_features
from snclr.evaluation.knn import evaluate_knn, knn
from snclr.evaluation.linear import linear_cached
from snclr.evaluation.linear_task import LinearHeads
from snclr.evaluation.results import read_results
from snclr.evaluation.session import Session
from snclr.evaluation.trained_on import count_trained_on
from snclr.runtime.stop import StopFlag, StopRequested
from snclr.train.build import build_method, encoder_spec
from snclr.train.config import read_config, resolve
from snclr.train.health import PURITY_IN_TRAINING, PURITY_OF_QUEUE
from snclr.train.load_run import load_trained_method
from snclr.train.pretrain import pretrain
from tests.helpers import tiny_run


@pytest.fixture(scope="module")
def test_images(tmp_path_factory) -> Path:
    """Noise of random mean color, hard to classify: 2 blue, 2 green and 6 red images, and one file that is no image."""
    folder, generator = tmp_path_factory.mktemp("test"), np.random.default_rng(1)
    for name, number in (("blue", 2), ("green", 2), ("red", 6)):
        (folder / name).mkdir()
        for index in range(number):
            pixels = generator.integers(60, 200, 3) + generator.integers(-50, 50, (20, 20, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{index}.png")
    (folder / "red" / "broken.png").write_bytes(b"no image at all")
    return folder


@pytest.fixture
def own(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "runs" / "run"))


def computed(monkeypatch) -> list[int]:
    """Count the images that pass through a network from now on."""
    plain, counts = extraction._forward, []
    monkeypatch.setattr(extraction, "_forward", lambda net, *args: counts.append(len(args[0])) or plain(net, *args))
    return counts


def features_of(run: Path, images: Path, test: Path, index=None) -> dict[str, tuple]:
    """The training and test features of the run's initial encoder and of the pixels, computed by hand."""
    config = resolve({**read_config(run / "config.yaml"), "resume": False})
    initial = build_method(config, encoder_spec(config)).encoder.eval()
    train, tested, _ = open_splits(str(images), str(test))
    sets = train if index is None else take(train, index), tested
    return {
        name: tuple(
            value
            for images in sets
            for part in [extract_features(encoder, images, image_size=16, quiet=True)]
            for value in (part.features, part.labels)
        )
        for name, encoder in (("untrained encoder", initial), ("raw pixels", nn.Flatten()))
    }


# ---- n, standard error, chance and baselines


def test_the_untrained_encoder_starts_its_residual_branches_as_the_run_did(images, test_images, tmp_path):
    run = tiny_run.train(
        images, tmp_path / "run", epochs=1, warmup_epochs=0, encoder="resnet18", stem="small", zero_init_residual=True
    )
    result = snclr.knn(run, test=str(test_images), k=5, quiet=True)
    sets = features_of(run, images, test_images)["untrained encoder"]
    assert result.baselines["untrained encoder"].top1 == knn(*sets, k=5).top1


def test_an_accuracy_in_half_precision_states_it(own, test_images):
    session = Session(own, "cpu", StopFlag(), quiet=True, cache=False, workers=0, precision="bf16")
    result = evaluate_knn(session, data=None, test=str(test_images), k=5, temperature=0.07, seed=0)
    (record,) = read_results(own)
    assert result.precision == record["precision"] == result.to_dict()["precision"] == "bf16"
    assert "precision" not in snclr.knn(own, test=str(test_images), k=5, quiet=True).to_dict()


def test_knn_states_n_standard_error_chance_and_baselines(own, images, test_images):
    result = snclr.knn(own, test=str(test_images), k=5, quiet=True)
    assert (result.n, result.classes, result.k) == (10, 3, 5)
    assert result.chance == pytest.approx(0.6)  # the share of the largest class
    assert result.standard_error == pytest.approx((result.top1 * (1 - result.top1) / 10) ** 0.5)
    for name, sets in features_of(own, images, test_images).items():
        expected = knn(*sets, k=5).top1
        assert result.baselines[name].top1 == expected
        assert result.baselines[name].standard_error == pytest.approx((expected * (1 - expected) / 10) ** 0.5)
    assert list(result.baselines) == ["untrained encoder", "raw pixels"]
    (record,) = read_results(own)
    assert record == json.loads(json.dumps(result.to_dict()))
    assert record["baselines"]["raw pixels"]["top1"] == result.baselines["raw pixels"].top1
    assert (record["n"], record["chance"]) == (10, result.chance)


@pytest.mark.parametrize("protocol", ["cached", "paper"])
def test_linear_baselines_are_trained_on_cached_features(own, images, test_images, protocol):
    settings = {"epochs": 3, "batch_size": 16} if protocol == "cached" else {}
    result = snclr.linear(own, test=str(test_images), protocol=protocol, epochs=3, batch_size=16, quiet=True)
    for name, sets in features_of(own, images, test_images).items():
        assert result.baselines[name].top1 == linear_cached(*sets, **settings).top1
        assert (result.baselines[name].note or "") == ("" if protocol == "cached" else "cached features")
    assert (result.n, result.chance) == (10, pytest.approx(0.6))


def test_finetune_has_chance_and_points_to_from_scratch(own, capsys):
    assert main(["finetune", str(own), "--labels=50%", "--epochs=1", "--no-baselines"]) == 0
    out = capsys.readouterr().out
    assert "8 test images; chance 37.5% (largest class)" in out
    assert "--from-scratch" in out
    (record,) = read_results(own)
    assert (record["n"], record["baselines"]) == (8, {})
    assert main(["finetune", str(own), "--labels=50%", "--epochs=1", "--from-scratch", "--no-baselines"]) == 0
    assert "--from-scratch" not in capsys.readouterr().out


@pytest.mark.parametrize("each", [1, 4])
def test_finetune_baselines_are_linear_classifiers_of_the_same_labels(
    own, images, test_images, tmp_path, each, monkeypatch, capsys
):
    train = open_splits(str(images), str(test_images))[0]
    chosen = np.concatenate([np.flatnonzero(train.labels == label)[-each:] for label in range(3)])
    (tmp_path / "list.txt").write_text("".join(f"{train.key(int(index))}\n" for index in chosen))
    argv = ["finetune", str(own), f"--test={test_images}", f"--labels={tmp_path / 'list.txt'}", "--epochs=1"]
    assert main(argv) == 0
    (record,) = read_results(own)
    settings = {"learning_rates": (0.1,)} if each == 1 else {}  # one image per class: none to hold out
    lines = capsys.readouterr().out.splitlines()
    for name, sets in features_of(own, images, test_images, chosen).items():
        expected = linear_cached(*sets, **settings).top1
        assert record["baselines"][name]["top1"] == expected
        (line,) = (line for line in lines if line.startswith(f"  {name}"))
        assert f"{expected:.1%} ± " in line
        assert line.endswith("linear classifier")
    counts = computed(monkeypatch)
    assert main([*argv, "--from-scratch"]) == 0
    assert sum(counts) == 10  # the test images by the fine-tuned network: the baselines are cached
    assert read_results(own)[1]["baselines"] == record["baselines"]


def test_an_unreadable_image_that_leaves_a_class_without_images_costs_only_the_baselines(own, test_images, tmp_path):
    (tmp_path / "list.txt").write_text("blue/blue_0.png\ngreen/green_0.png\nred/broken.png\n")
    result = snclr.finetune(own, test=str(test_images), labels=tmp_path / "list.txt", epochs=1, quiet=True)
    assert (result.n, result.baselines) == (10, {})
    assert "no baselines: 1 of the test images' classes have no labeled training image" in result.warnings[-1]


def test_baselines_are_cached_and_shared_by_runs_of_one_folder(own, monkeypatch):
    first = snclr.knn(own, k=5, quiet=True)
    counts = computed(monkeypatch)
    steps: list[int] = []
    plain = LinearHeads.step
    monkeypatch.setattr(LinearHeads, "step", lambda self, *args: steps.append(1) or plain(self, *args))
    again = snclr.knn(own, k=5, quiet=True)
    assert replace(again, time=first.time) == first
    assert counts == []
    snclr.linear(own, epochs=2, quiet=True)
    whole = len(steps)
    counts.clear()
    snclr.linear(own, epochs=2, quiet=True)
    assert len(steps) == whole + whole // 3  # only the run's own classifier
    other = Path(shutil.copytree(own, own.parent / "other", ignore=shutil.ignore_patterns("evaluation")))
    assert snclr.knn(other, k=5, quiet=True).baselines == first.baselines
    assert sum(counts) == 48  # the features of the run itself


def test_baselines_are_computed_again_for_changed_images(own, images, tmp_path, monkeypatch):
    data = Path(shutil.copytree(images, tmp_path / "data"))
    snclr.knn(own, data=str(data), k=5, quiet=True)
    Image.new("RGB", (20, 20)).save(data / "red" / "red_0.png")
    counts = computed(monkeypatch)
    snclr.knn(own, data=str(data), k=5, quiet=True)
    assert sum(counts) > 48


def test_a_stopped_baseline_continues_with_the_same_result(own, monkeypatch):
    settings = {"epochs": 4, "batch_size": 16, "lr": 0.1, "quiet": True}
    other = Path(shutil.copytree(own, own.parent.parent / "other"))
    undisturbed = snclr.linear(other, **settings)
    plain, steps = LinearHeads.step, []

    def step(self, *args):
        steps.append(1)
        if len(steps) == 16:  # of 12 for the run and 24 for the baselines
            os.kill(os.getpid(), signal.SIGINT)
        return plain(self, *args)

    monkeypatch.setattr(LinearHeads, "step", step)
    with pytest.raises(StopRequested):
        snclr.linear(own, **settings)
    assert read_results(own) == []
    result = snclr.linear(own, **settings)
    assert replace(result, time=undisturbed.time) == undisturbed
    assert len(steps) == 36  # nothing is done twice


def test_no_baselines_encodes_the_images_once(own, monkeypatch, capsys):
    counts = computed(monkeypatch)
    assert main(["knn", str(own), "--no-baselines", "--k=5"]) == 0
    assert sum(counts) == 48
    assert "raw pixels" not in capsys.readouterr().out
    monkeypatch.setattr("snclr.evaluation.baselines.MAX_IMAGES", 40)
    result = snclr.knn(own, k=5, quiet=True)  # too many for the default
    assert result.baselines == {}
    assert any("--baselines" in warning for warning in result.warnings)
    assert len(snclr.knn(own, k=5, baselines=True, quiet=True).baselines) == 2


def test_the_baseline_of_a_run_from_other_weights_says_so(own, images, tmp_path, capsys):
    started = tiny_run.train(images, tmp_path / "started", init_from=str(own))
    assert main(["knn", str(started), "--k=5"]) == 0
    assert f"random weights; the run started from {own}" in capsys.readouterr().out


def test_the_text_of_knn_has_four_lines(own, test_images, capsys):
    assert main(["knn", str(own), "--test", str(test_images), "--k=5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5  # the fifth: an unreadable image in each of the folders
    assert lines[0] == "kNN top-1 ± s.e., k = 5, 10 test images; chance 60.0% (largest class)"
    assert [line.split("  ")[1] for line in lines[1:4]] == ["this run", "untrained encoder", "raw pixels"]
    assert all("% ± " in line for line in lines[1:4])
    assert max(map(len, lines)) <= 80


def test_images_without_a_label_are_counted(own, images, test_images, capsys):
    data = Path(shutil.copytree(images, own.parent / "some"))
    for name in ("x", "y"):
        Image.new("RGB", (20, 20)).save(data / f"{name}.png")
    assert main(["knn", str(own), "--data", str(data), "--test", str(test_images), "--no-baselines"]) == 0
    assert "  images without a label: 2, left out\n" in capsys.readouterr().out


# ---- warnings


def warnings_of(run: Path, **settings) -> list[str]:
    return snclr.knn(run, **{"k": 5, "baselines": False, "quiet": True, **settings}).warnings


def test_k_above_the_smallest_class_is_a_warning(own, images, test_images, capsys):
    few = Path(shutil.copytree(images, own.parent / "few"))
    for number in range(3, 16):
        (few / "green" / f"green_{number}.png").unlink()
    data = {"data": str(few), "test": str(test_images)}
    assert warnings_of(own, **data, k=3) == []
    (warning,) = warnings_of(own, **data, k=4)
    assert warning == "k = 4 exceeds the 3 training images of class green; give a smaller --k, or --k auto"
    assert main(["knn", str(own), "--data", str(few), "--test", str(test_images), "--k=4", "--no-baselines"]) == 0
    assert f"warning: {warning}\n" in capsys.readouterr().err


def test_k_is_automatic_and_a_lowered_k_is_said_on_the_terminal(own, images, test_images, capsys):
    command = ["knn", str(own), "--data", str(images), "--test", str(test_images), "--no-baselines"]
    sizes = [len(list((images / name).glob(f"{name}_*.png"))) for name in ("blue", "green", "red")]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert f"k = {min(sizes)} (auto)" in printed.out.splitlines()[0]
    assert "exceeds" not in printed.err
    record = read_results(own, "knn")[-1]
    assert record["k"] == min(sizes)
    assert f"k = {min(sizes)} (auto), temperature" in record["protocol"]
    assert (
        record["numbers"]["top1"]
        == snclr.knn(own, data=str(images), test=str(test_images), k=min(sizes), baselines=False, quiet=True).top1
    )
    assert main([*command, "--k=999"]) == 0
    total = sum(sizes)
    assert f"warning: k = 999 is more than the {total} training images: k = {total} was used" in capsys.readouterr().err


def test_test_images_that_were_trained_on_are_counted(own, images, test_images, tmp_path):
    assert warnings_of(own, test=str(test_images)) == []
    copies = Path(shutil.copytree(test_images, tmp_path / "copies"))
    shutil.copy(images / "blue" / "blue_3.png", copies / "blue" / "other-name.png")
    (copies / "red" / "link.png").symlink_to(images / "red" / "red_1.png")
    (warning,) = warnings_of(own, test=str(copies))
    assert warning == "the run was trained on 2 of the 12 test images"
    assert snclr.finetune(own, test=str(copies), labels="50%", epochs=1, quiet=True).warnings == [warning]
    linear = snclr.linear(own, test=str(copies), epochs=1, lr=0.1, baselines=False, quiet=True)
    assert linear.warnings == [warning]


def test_an_unreadable_training_image_does_not_hide_the_test_image_of_its_name(own, images, tmp_path):
    train, test = (Path(shutil.copytree(images, tmp_path / name)) for name in ("train", "test"))
    (warning,) = warnings_of(own, data=str(train), test=str(test))
    assert "trained on 48 of the 48" in warning
    (train / "blue" / "blue_1.png").write_bytes(b"no image")
    assert warnings_of(own, data=str(train), test=str(test)) == [warning]


def test_a_held_out_fifth_is_a_warning(own, images, tmp_path):
    (warning,) = warnings_of(own)
    assert warning == (
        "the test images are a held-out fifth of the data, and the run was trained on all of them; --test gives"
        " separate ones"
    )
    other = tiny_run.write_images(tmp_path / "other", seed=7)
    assert warnings_of(own, data=str(other)) == [
        "the test images are a held-out fifth of the data; --test gives separate ones"
    ]


def test_files_of_equal_size_are_compared_by_content(tmp_path):
    for name, colors in (("a", ("red", "blue")), ("b", ("blue", "black", "white"))):
        (tmp_path / name).mkdir()
        for color in colors:
            Image.new("RGB", (8, 8), color).save(tmp_path / name / f"{name}-{color}.bmp")
    assert count_trained_on(open_dataset(tmp_path / "b"), open_dataset(tmp_path / "a")) == 1


def test_images_of_unlike_datasets_are_compared_by_pixels(images, tmp_path):
    files = open_dataset(images)
    ids = np.array([index for index in range(len(files)) if "broken" not in files.key(index)])
    array = ArrayDataset("array", np.stack([files.load(int(index)) for index in ids[:5]]))
    assert count_trained_on(array, files) == 5
    assert count_trained_on(files, array) == 5
    black = ArrayDataset("black", np.concatenate([np.zeros((1, 20, 20, 3), np.uint8), array.images[:2]]))
    assert count_trained_on(black, array) == 2
    assert count_trained_on(ArrayDataset("small", array.images[:, :10]), array) == 0


def test_missing_training_images_are_no_error(own, test_images):
    config = own / "config.yaml"
    config.write_text(config.read_text().replace("data: ", "data: /nowhere"))
    assert warnings_of(own, data=str(test_images), test=str(test_images), k=2) == []


# ---- neighbor purity


def test_neighbor_purity_is_explained_with_its_chance_level(own, test_images, capsys):
    assert main(["neighbors", str(own), "--data", str(test_images), "--k=2"]) == 0
    out = capsys.readouterr().out
    expected = 0.2**2 + 0.2**2 + 0.6**2
    assert (
        "  share of neighbors with the image's class, center crops against center crops;"
        f" chance {expected:.1%}\n" in out
    )
    (record,) = read_results(own, "neighbors")
    assert (record["n"], record["chance"]) == (10, pytest.approx(expected))
    queue = snclr.neighbors(own, data=str(test_images), candidates="queue", k=2, quiet=True)
    assert queue.purity_description.startswith(PURITY_OF_QUEUE)
    method, config = load_trained_method(own)
    classes = open_dataset(config.data).labels[method.queue.ids[: len(method.queue)].numpy()]
    shares = np.bincount(classes, minlength=3) / len(classes)
    assert queue.chance == pytest.approx(float(shares @ [0.2, 0.2, 0.6]))


def test_pretraining_explains_neighbor_purity_once(images, tmp_path, capsys):
    pretrain(
        data=str(images), out=str(tmp_path / "run"), encoder="resnet10-tiny", stem="half", image_size=16, batch_size=16,
        epochs=2, warmup_epochs=1, hidden=16, dim=8, neighbors=3, queue_length=32, workers=0, device="cpu",
        log_every=1,
    )  # fmt: skip
    err = capsys.readouterr().err
    assert err.count(f"neighbor purity: {PURITY_IN_TRAINING}; chance 33%") == 1
    assert err.index(PURITY_IN_TRAINING) < err.index("epoch 1/2:")
