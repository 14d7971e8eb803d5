"""The command line as a person uses it: fast help, readable errors, no tracebacks."""

import json
import subprocess
import sys

import pytest

from snclr.cli import COMMANDS, main


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
