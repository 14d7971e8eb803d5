"""What a new user meets first: suggested commands, refused settings, loader code, hints after a typo."""

import shlex
import shutil

import pytest

from snclr.cli.main import main
from snclr.cli.pretrain import show_pretrain
from snclr.train.pretrain import PretrainResult


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
    neighbors, knn = suggested(capsys.readouterr().out.partition("Next:")[2])
    assert neighbors == ["snclr", "neighbors", str(spaced)]
    assert knn == ["snclr", "knn", str(spaced), "--data", "LABELED"]


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
