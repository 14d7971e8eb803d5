"""What a new user meets first: suggested commands, refused settings, loader code, hints after a typo."""

import shlex
import shutil
from types import SimpleNamespace

import pytest
import yaml

import snclr
from snclr import UserError
from snclr.cli.main import main
from snclr.cli.pretrain import show_pretrain
from snclr.train.pretrain import PretrainResult
from tests.helpers import tiny_run


@pytest.fixture
def spaced(run, tmp_path):
    """A copy of a run whose path needs quotes."""
    return shutil.copytree(run, tmp_path / "with space" / "it's a run")


def suggested(text):
    """Return the commands in a printed text, split as a shell would."""
    lines = [line[line.index("snclr ") :] for line in text.splitlines() if "snclr " in line]
    return [shlex.split(line, comments=True) for line in lines]


def test_the_commands_after_a_run_can_be_pasted(spaced, capsys):
    show_pretrain(PretrainResult(spaced, 6, 6, 0))
    neighbors, knn, report = suggested(capsys.readouterr().out.partition("Next:")[2])
    assert neighbors == ["snclr", "neighbors", str(spaced)]
    assert knn == ["snclr", "knn", str(spaced), "--data", "LABELED"]
    assert report == ["snclr", "report", str(spaced)]


def test_a_run_on_labeled_images_needs_no_data_for_knn(run, capsys):
    trained = snclr.pretrain(out=str(run), resume=True, quiet=True)
    assert trained.labeled
    show_pretrain(trained)
    assert suggested(capsys.readouterr().out.partition("Next:")[2])[1] == ["snclr", "knn", str(run)]


@pytest.mark.parametrize(
    ("missing", "command"), [("encoder.safetensors", ["knn"]), ("checkpoints", ["neighbors", "--rows", "2"])]
)
def test_the_command_that_completes_a_run_can_be_pasted(spaced, missing, command, images, capsys):
    (shutil.rmtree if missing == "checkpoints" else (lambda path: path.unlink()))(spaced / missing)
    assert main([*command, str(spaced), "--data", str(images)]) == 2
    text = capsys.readouterr().err.rpartition("Continue it with ")[2]
    assert suggested(text) == [["snclr", "pretrain", "--resume", "--out", str(spaced)]]


def test_the_command_after_pack_can_be_pasted(images, tmp_path, capsys):
    shards = tmp_path / "with space"
    assert main(["pack", str(images), "--shards", str(shards)]) == 0
    assert suggested(capsys.readouterr().out)[-1][2:4] == ["--data", str(shards)]


def test_a_queue_of_default_length_is_capped_at_the_number_of_images(images, tmp_path, capsys):
    tiny_run.train(images, tmp_path / "run", queue_length=None, quiet=False)  # photos has 4096
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["queue_length"] == 49
    error = capsys.readouterr().err
    assert "queue of 49 features" in error
    assert "warning" not in error


def test_a_given_queue_longer_than_the_data_is_kept_with_a_warning(images, tmp_path, capsys):
    run = tiny_run.train(images, tmp_path / "run", queue_length=60, quiet=False)
    assert yaml.safe_load((run / "config.yaml").read_text())["queue_length"] == 60
    warning = "warning: --queue-length 60 is more than the number of images"
    assert warning in capsys.readouterr().err
    assert warning in (run / "train.log").read_text()
    snclr.pretrain(out=str(run), resume=True)
    assert warning not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"neighbors": 49}, "neighbors=49 must be below the number of images, 49"),
        ({"neighbors": 41}, "neighbors=41 must be at most queue_length=40"),
    ],
)
def test_too_many_neighbors_are_refused(images, tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        tiny_run.train(images, tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=message):
        snclr.plan(data=str(images), batch_size=16, **{"queue_length": 40, **settings})


def test_a_run_without_neighbors_accepts_any_queue(images, tmp_path):
    tiny_run.train(images, tmp_path / "run", sides="neither", queue_length=1)


def test_resuming_a_run_that_does_not_exist_suggests_a_similar_one(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "photos")
    for argv in (["pretrain", "--resume", "--out", str(tmp_path / "phtos")], ["knn", str(tmp_path / "phtos")]):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert f"{tmp_path / 'phtos'} (did you mean '{tmp_path / 'photos'}'?)" in error
    assert not (tmp_path / "phtos").exists()
    assert main(["pretrain", "--resume", "--out", str(tmp_path / "zebra")]) == 2
    assert f"there is no run to resume in {tmp_path / 'zebra'}. Give" in capsys.readouterr().err


def test_a_run_is_found_in_the_folder_of_runs(run, tmp_path, monkeypatch, capsys):
    shutil.copytree(run, tmp_path / "runs" / "photos")
    monkeypatch.chdir(tmp_path)
    assert main(["knn", "photos"]) == 2
    assert "there is no run directory photos (did you mean 'runs/photos'?)" in capsys.readouterr().err


def test_resume_with_data_says_that_it_starts_a_new_run(images, tmp_path, capsys):
    run = tiny_run.train(images, tmp_path / "run", resume=True, quiet=False)
    said = f"no run in {run}: starting a new one\n"
    assert said in capsys.readouterr().err
    snclr.pretrain(data=str(images), out=str(run), resume=True)
    assert said not in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "config"])
def test_a_damaged_encoder_names_the_command_that_repairs_it(run, tmp_path, damage, images, capsys):
    broken = shutil.copytree(run, tmp_path / "run")
    file = broken / ("config.json" if damage == "config" else "encoder.safetensors")
    intact = file.read_bytes()
    changed = {"flip": intact[:-1] + bytes([intact[-1] ^ 1]), "cut": intact[:-9], "config": b"{"}.get(damage)
    file.unlink() if changed is None else file.write_bytes(changed)
    assert main(["knn", str(broken), "--data", str(images)]) == 2
    (command,) = suggested(capsys.readouterr().err.rpartition(": " if damage != "missing" else "with ")[2])
    assert main(command[1:]) == 0
    assert file.read_bytes() == intact


def test_a_disk_too_small_for_the_checkpoints_is_refused_before_training(run, images, tmp_path, monkeypatch):
    saved = sorted((run / "checkpoints").glob("step-*"))[-1]
    size = sum(path.stat().st_size for path in saved.iterdir())
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=int(2.5 * size)))
    out = tmp_path / "run"
    with pytest.raises(UserError, match=r"no space for the checkpoints in .*/run/checkpoints: ([\d,]+) bytes needed"):
        tiny_run.train(images, out)
    assert not out.exists()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=int(3.1 * size)))
    tiny_run.train(images, out)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=int(1.2 * size)))
    snclr.pretrain(out=str(out), resume=True, quiet=True)  # two of the three are there


def test_embed_names_the_split(run, images, tmp_path, capsys):
    assert main(["embed", str(run), "--data", str(images), "--split", "all", "--out", str(tmp_path / "a.npy")]) == 0
    assert f"images: {images}, split all" in capsys.readouterr().out
