"""The command line as a person uses it: fast help, readable errors, no tracebacks."""

import json
import shlex
import subprocess
import sys

import pytest

from snclr.cli import COMMANDS, _parser, main
from snclr.commands.evaluation import same_command


def test_import_and_help_load_nothing_heavy():
    code = (
        "import sys, snclr, snclr.cli\n"
        "try: snclr.cli.main(['pretrain', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'PIL', 'timm', 'torchvision', 'lightning_fabric', 'matplotlib', 'rich', 'yaml'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"snclr {command}" in capsys.readouterr().out


def test_every_setting_is_a_flag(capsys):
    flags = (
        "--data --out --recipe --method --encoder --image-size --batch-size --epochs --lr --weight-decay --optimizer"
        " --warmup-epochs --temperature --neighbors --queue-length --gamma --loss-form --momentum --seed --workers"
        " --precision --devices --nodes --resume --overwrite --init-from --checkpoint-every --json"
    )
    with pytest.raises(SystemExit):
        main(["pretrain", "--help"])
    text = capsys.readouterr().out
    assert [
        flag for flag in flags.split() if f"{flag} " not in text and f"{flag}," not in text and f"{flag}\n" not in text
    ] == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["pretrain", "--out", "x"], ["data is missing", "--data"]),
        (["pretrain", "--data", "demo"], ["out is missing", "--out"]),
        (["pretrain", "--data", "demo", "--out", "{tmp}/r", "--recipe", "nope"], ["no recipe 'nope'", "photos"]),
        (["pretrain", "--data", "demo", "--out", "{tmp}/r", "--encoder", "resnet81"], ["resnet81", "resnet18"]),
        (["pretrain", "--data", "no-such-folder", "--out", "{tmp}/r"], ["no-such-folder", "demo"]),
        (["pretrain", "--data", "demo", "--out", "{tmp}/r", "--batch-size", "7000"], ["6000", "7000"]),
        (["pretrain", "--data", "demo", "--out", "x", "--precision", "bf16", "--accelerator", "cpu"], ["bf16", "32"]),
        (["pretrain", "--data", "demo", "--out", "{tmp}/r", "--accumulate", "2"], ["accumulate=2", "cannot be summed"]),
        (["pretrain", "--data", "demo", "--out", "{tmp}/r", "--gamma", "most"], ["gamma", "max"]),
        (["knn", "{tmp}/nothing"], ["nothing", "--out"]),
        (["encoders", "zzz"], ["zzz"]),
        (["recipes", "zzz"], ["zzz", "photos"]),
    ],
)  # fmt: skip
def test_bad_input_gets_one_clear_line_and_exit_2(argv, words, tmp_path, capsys):
    assert main([word.format(tmp=tmp_path) for word in argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"snclr {argv[0]}: ")
    assert "Traceback" not in captured.err
    for word in words:
        assert word in captured.err.replace(",", ""), captured.err


def test_lists_are_printed_and_as_json(capsys):
    assert main(["recipes", "--json"]) == 0
    assert "demo" in json.loads(capsys.readouterr().out)
    assert main(["recipes", "resnet50-imagenet"]) == 0
    assert "128000" in capsys.readouterr().out
    assert main(["encoders", "vit_small"]) == 0
    assert "vit_small_patch16_224" in capsys.readouterr().out
    assert main(["methods"]) == 0
    assert "snclr" in capsys.readouterr().out


def test_an_unknown_command_names_the_known_ones(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["pretrian"])
    assert caught.value.code == 2
    assert "pretrain" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["finetune", "a run", "--head-lr", "0", "--seed", "0", "--labels", "1%"],
        ["detect", "run", "--data", "coco", "--draw", "0", "--short-side", "64-80"],
        ["detect", "run", "--data", "coco", "--images", "pictures", "--keep-empty"],
        ["search", "run", "cat.jpg", "--k", "3"],
        ["neighbors", "run", "a.jpg", "b.jpg"],
        ["neighbors", "run"],
        ["report", "run", "--images", "40"],
        ["embed", "run", "--out", "f.npy", "--normalize"],
    ],
)
def test_the_command_to_go_on_with_is_the_one_that_was_given(argv):
    given = _parser(argv)[0].parse_args(argv)
    words = shlex.split(same_command(given))
    assert words[0] == "snclr"
    assert _parser(words[1:])[0].parse_args(words[1:]) == given


@pytest.mark.parametrize(
    ("command", "flag", "default"),
    [("knn", "--seed", "0"), ("finetune", "--weight-decay", "0.0"), ("embed", "--workers", "0"),
     ("pretrain", "--seed", "0"), ("pack", "--seed", "0")],
)  # fmt: skip
def test_a_default_of_0_is_shown(command, flag, default, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split("\n\n", 1)[1].split())
    about = text.split(f" {flag} ", 1)[1].split(" --", 1)[0]
    assert f"(default: {default})" in about
    assert "(default: False)" not in text
