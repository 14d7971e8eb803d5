"""The command line: fast help, every flag, one-line errors, exit codes."""

import errno
import json
import os
import shlex
import signal
import subprocess
import sys

import pytest

from snclr.cli import main as program
from snclr.cli.flags import normalize_spelling
from snclr.cli.main import COMMANDS, build_app, load_command, main
from snclr.errors import UserError
from snclr.methods.config import METHODS
from snclr.runtime.settings import current_name
from snclr.runtime.stop import StopRequested
from snclr.train.config import resolve

_SETTINGS = (
    "--data --out --recipe --method --preset --encoder --image-size --stem --heads --sincos --no-sincos"
    " --freeze-patch-embed --no-freeze-patch-embed --hidden --dim --projector-layers --predictor-layers --final-bn"
    " --no-final-bn --batch-size --epochs --optimizer --lr --weight-decay --warmup-epochs --clip-gradient --temperature"
    " --neighbors --queue-length --gamma --loss-form --sides --weights --attention --attention-temperature"
    " --attention-gradient --no-attention-gradient --times-2tau --no-times-2tau --neighbor-free-epochs --push"
    " --queue-dtype --momentum --momentum-schedule --prototypes --freeze-prototypes-epochs --teacher-temperature"
    " --teacher-warmup-epochs --center-momentum --redundancy-weight --views --crop-min --seed --workers --precision"
    " --accelerator --devices --nodes --timeout --threads --compile --no-compile --resume --no-resume --overwrite"
    " --no-overwrite --init-from --checkpoint-every --keep-checkpoints --log-every --max-bad-share"
)
_RUN_DIR = ("--out", "--resume", "--no-resume", "--overwrite", "--no-overwrite", "--init-from")
_RANKS = "--workers --device --devices --nodes"
_STUDY = "--seeds --results --name --eval-data --test --k --jobs --keep-runs --dry-run"
# Flags of the first release: users' scripts contain them.
FLAGS = {
    "demo": "--out --seed --epochs",
    "pretrain": _SETTINGS,
    "plan": "--steps " + " ".join(flag for flag in _SETTINGS.split() if flag not in _RUN_DIR),
    "doctor": "--device --devices --recipe --only --quick",
    "knn": f"--data --test {_RANKS} --no-cache --seed --k --temperature",
    "fewshot": f"--data --test {_RANKS} --no-cache --seed --labels-per-class --draws",
    "linear": f"--data --test {_RANKS} --no-cache --seed --protocol --epochs --batch-size --lr",
    "neighbors": f"--data --candidates --k --neighbors --rows --seed --out {_RANKS} --no-cache",
    "export": "--to --out",
    "import": "--encoder --out --image-size --stem --heads",
    "explore": "--data --test --gallery --port --static --images --overwrite --device --no-cache",
    "curate": f"--out --keep --find --data --test --threshold --number --k --overwrite {_RANKS} --no-cache",
    "finetune": f"--data --test {_RANKS} --seed --labels --from-scratch --epochs --batch-size --lr --head-lr"
    " --weight-decay",
    "detect": "--data --init --encoder --recipe --iterations --batch-size --lr --weight-decay --long-side --width"
    " --rois --proposals --anchor --seed --short-side --keep-empty --train-annotations --val-annotations --images"
    " --val-images --max-bad-share --detector --draw --draw-score --workers --accelerator --devices --nodes"
    " --precision",
    "embed": f"--data --out --normalize --split --batch-size {_RANKS} --no-cache",
    "search": f"--data --k --index --embeddings --split --out {_RANKS} --no-cache",
    "explain": "--candidates --out --workers --device",
    "report": "--out --data --images --rows --k --neighbors --no-embeddings --seed --workers --device --no-cache",
    "compare": f"--methods --study --budget --tune --tune-seed --coco {_STUDY} {_SETTINGS}",
    "ablate": f"--table --values --steps {_STUDY} {_SETTINGS}",
    "pack": "--shards --shard-size --images-per-shard --seed --no-shuffle --check --workers --overwrite --verify",
    "recipes": "",
    "encoders": "",
    "methods": "",
    "studies": "",
}


def accepted_flags(command):
    collection = build_app([command])[command].assemble_argument_collection()
    return {name for argument in collection for name in argument.names}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_of_the_first_release_is_accepted(command):
    present = {current_name(flag) for flag in FLAGS[command].split()}
    assert {*present, "--json"} - accepted_flags(command) == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_every_flag_has_help(command, capsys):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"snclr {command}" in text
    assert "xample" in text
    for argument in build_app([command])[command].assemble_argument_collection():
        assert argument.parameter.help or not argument.show, argument.name


@pytest.mark.parametrize("command", COMMANDS)
def test_indented_lines_of_the_help_fit_into_80_columns(command):
    lines = load_command(command).examples.splitlines()
    assert [line for line in lines if line.startswith("  ") and len(line) > 80] == []


def test_no_flag_is_split_in_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("pretrain", "knn"):
        main([command, "--help"])
        words = capsys.readouterr().out.replace("│", " ").split()
        for argument in build_app([command])[command].assemble_argument_collection():
            assert not argument.show or {name for name in argument.names if name.startswith("--")} <= {*words}


def test_import_and_help_load_nothing_heavy():
    code = """
import sys, snclr, snclr.cli.main
heavy = {'torch', 'numpy', 'PIL', 'timm', 'torchvision', 'lightning_fabric', 'matplotlib', 'scipy'}
for command in ([], *([name] for name in snclr.cli.main.COMMANDS)):
    snclr.cli.main.main([*command, '--help'])
    assert not heavy & set(sys.modules), (command, heavy & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("argv", "fragments"),
    [
        (["pretrain", "--out", "x"], ["data is missing", "--data"]),
        (["pretrain", "--data", "demo"], ["out is missing", "--out"]),
        (["pretrain", "--data", "demo", "--out", "{tmp}/r", "--recipe", "nope"], ["recipe 'nope'", "photos"]),
        (["pretrain", "--data", "demo", "--out", "{tmp}/r", "--encoder", "resnet81"], ["resnet81", "resnet18"]),
        (["pretrain", "--data", "no-such-folder", "--out", "{tmp}/r"], ["no-such-folder", "demo"]),
        (["pretrain", "--data", "demo", "--out", "{tmp}/r", "--batch-size", "7000"], ["6000", "7000"]),
        (["pretrain", "--data", "demo", "--out", "x", "--precision", "bf16", "--device", "cpu"], ["bf16", "32"]),
        (["pretrain", "--data", "demo", "--out", "{tmp}/r", "--seed", "-1"], ["--seed must be", "at least 0"]),
        (["pretrain", "--data", "demo", "--out", "{tmp}/r", "--image-size", "4"], ["--image-size must be", "8"]),
        (["pretrain", "--epochs", "5", "--warmup-epochs", "9"], ["--warmup-epochs 9 must be below --epochs 5"]),
        (["pretrain", "--attention", "linear"], ["--attention 'linear'", "Set --attention-gradient."]),
        (["pretrain", "--method", "byol", "--no-times-2tau"], ["--method byol does not use --no-times-2tau"]),
        (["knn", "{tmp}/nothing"], ["nothing", "--out"]),
        (["encoders", "zzz"], ["zzz"]),
        (["recipes", "zzz"], ["zzz", "photos"]),
        (["methods", "byoll"], ["byoll", "did you mean 'byol'?"]),
    ],
)  # fmt: skip
def test_bad_input_prints_one_line_and_exits_with_2(argv, fragments, tmp_path, capsys):
    assert main([argument.format(tmp=tmp_path) for argument in argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"snclr {argv[0]}: ")
    assert error.count("\n") == 1
    for fragment in fragments:
        assert fragment in error.replace(",", ""), error


_PRETRAIN = "snclr pretrain --data DATA --out OUT [OPTIONS]"


@pytest.mark.parametrize(
    ("argv", "fragment", "usage"),
    [
        (["pretrian"], 'Did you mean "pretrain"?', "snclr COMMAND"),
        (["pretrain", "--imagesize", "3"], "--imagesize. Did you mean --image-size?", _PRETRAIN),
        (["pretrain", "--method", "snclrr"], "(did you mean 'snclr'?)", _PRETRAIN),
        (["pretrain", "--lr", "high"], '--lr: "high" is not a number', _PRETRAIN),
        (["pretrain", "--epochs", "five"], '--epochs: "five" is not a whole number', _PRETRAIN),
        (["pretrain", "/usr"], "unexpected argument /usr. Did you mean --data /usr?", _PRETRAIN),
        (["pretrain", "/usr", "r s"], "/usr 'r s'. Did you mean --data /usr --out 'r s'?", _PRETRAIN),
        (["pretrain", "—data", "x"], "Did you mean --data, with two hyphens?", _PRETRAIN),
        (["pretrain", "--data", "demo", "--out"], "--out needs a value", _PRETRAIN),
        (["knn", "run", "--k", "1.5"], '"1.5" is not a whole number or auto', "snclr knn RUN [OPTIONS]"),
        (["fewshot", "run", "--labels", "2"], "Did you mean --labels-per-class?", "snclr fewshot RUN [OPTIONS]"),
        (["export", "run", "--format", "onnx"], "unknown option --format. The formats are --to.",
         "snclr export RUN --to TO [OPTIONS]"),
        (["export", "run", "--to", "timm", "onnx"], "argument onnx. Separate formats by commas: --to timm,onnx",
         "snclr export RUN --to TO [OPTIONS]"),
        (["pretrain", "--model", "resnet50"], "The model is --encoder.", _PRETRAIN),
        (["explore", "run", "--no-open"], "only prints the address.", "snclr explore RUN [OTHER] [OPTIONS]"),
        (["knn", "run", "--neighbours", "5"], "The number of neighbors is --k.", "snclr knn RUN [OPTIONS]"),
        (["pack", "--data", "x"], "snclr pack FOLDER --shards OUT", "snclr pack [FOLDER] [OPTIONS]"),
        (["ablate", "--tabel", "queue"], "Did you mean --table instead of --tabel?",
         "snclr ablate --data DATA --table TABLE --out OUT [OPTIONS]"),
        (["plan", "--data", "demo", "stray"], "unexpected argument stray", "snclr plan --data DATA [OPTIONS]"),
        (["plan", "--gamma", "most"], '--gamma: "most" is not a number or max', "snclr plan --data DATA [OPTIONS]"),
        (["knn", "run", "--hel"], "unknown option --hel. Did you mean --help?", "snclr knn RUN [OPTIONS]"),
        (["knn"], "RUN is missing", "snclr knn RUN [OPTIONS]"),
        (["neighbors"], "RUN is missing", "snclr neighbors RUN [IMAGE...] [OPTIONS]"),
        (["export", "run"], "--to is missing; choose one or more of torchvision, timm, detectron2",
         "snclr export RUN --to TO [OPTIONS]"),
        (["explore"], "RUN is missing", "snclr explore RUN [OTHER] [OPTIONS]"),
    ],
)  # fmt: skip
def test_a_typo_prints_a_suggestion_and_the_usage_of_the_command(argv, fragment, usage, capsys):
    assert main(argv) == 2
    error, shown, advice = capsys.readouterr().err.splitlines()
    assert fragment in error
    assert shown == f"Usage: {usage}"
    assert "--help` lists the" in advice


def _spelled(*argv):
    return normalize_spelling(argv, program.COMMANDS)


def test_other_spellings_are_accepted(monkeypatch, tmp_path):
    given = program.parse(_spelled("pretrain", "--neighbours=3", "--method", "MoCo-v3")).arguments
    assert given == {"neighbors": 3, "method": "mocov3"}
    given = program.parse(_spelled("pretrain", "--accelerator", "cpu", "--data=accelerator")).arguments
    assert given == {"device": "cpu", "data": "accelerator"}
    assert _spelled("neighbours", "neighbours/run") == ["neighbors", "neighbours/run"]
    assert _spelled("KNN", "Runs/A") == ["knn", "Runs/A"]
    config = resolve({"recipe": "VIT_small_ImageNet", "method": "SNCLR", "neighbours": 7})
    assert (config.recipe, config.method, config.neighbors) == ("vit-small-imagenet", "snclr", 7)


def test_python_errors_name_settings(tmp_path):
    with pytest.raises(UserError, match=r"^image_size must be a whole number"):
        resolve({"image_size": 4})


def test_without_a_command_the_help_is_printed(capsys):
    assert main([]) == 0
    assert "pretrain" in capsys.readouterr().out


def test_lists_print_as_text_and_json(capsys):
    assert main(["recipes", "--json"]) == 0
    assert "demo" in json.loads(capsys.readouterr().out)
    assert main(["recipes", "resnet50-imagenet"]) == 0
    assert "128000" in capsys.readouterr().out
    assert main(["encoders", "vit_small"]) == 0
    assert "vit_small_patch16_224" in capsys.readouterr().out
    assert main(["methods"]) == 0
    assert "snclr" in capsys.readouterr().out
    assert main(["methods", "byol", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["momentum"] == 0.996


def test_lists_are_not_wrapped_in_a_pipe(capsys):
    assert main(["methods"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(METHODS)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)])
def test_a_stop_prints_how_to_continue(number, code, monkeypatch, capsys):
    def stop(self, arguments):
        raise StopRequested(number, 3, 10)

    monkeypatch.setattr("snclr.cli.flags.Command.call", stop)
    argv = ["plan", "--data", "my photos", "--recipe", "demo"]
    assert main(argv) == code
    error = capsys.readouterr().err
    assert f"stopped by {number.name} after step 3 of 10" in error
    assert shlex.split(error.splitlines()[-1]) == ["snclr", *argv]
    assert main(["knn", "run", "--no-cache"]) == code
    assert "features were not cached" in capsys.readouterr().err
    assert main(["pretrain", "--data=x", "--out", "my run", "--overwrite", "--json"]) == code
    captured = capsys.readouterr()
    assert shlex.split(captured.err.splitlines()[-1]) == ["snclr", "pretrain", "--resume", "--out", "my run"]
    assert json.loads(captured.out) == {
        "complete": False, "stopped_by": number.name, "exit_code": code, "step": 3, "total_steps": 10
    }  # fmt: skip


def test_only_settings_that_were_given_are_passed_on(monkeypatch):
    given = program.parse(["pretrain", "--data", "x", "--epochs", "7", "--no-sincos", "--gamma", "max"]).arguments
    assert given == {"data": "x", "epochs": 7, "sincos": False, "gamma": "max"}


def test_a_flag_wins_over_the_config_file_and_the_file_over_the_recipe(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("recipe: cifar\nepochs: 5\nbatch_size: 32\nout: elsewhere\n")
    resolved = []

    def launch(config):
        resolved.append(config)
        raise UserError("stop here")

    monkeypatch.setattr("snclr.train.pretrain.launch_run", launch)
    argv = ["pretrain", "--data", "demo", "--out", "run", "--config", str(tmp_path / "config.yaml"), "--epochs", "7"]
    assert main(argv) == 2
    (config,) = resolved
    assert (config.epochs, config.batch_size, config.recipe, config.out) == (7, 32, "cifar", "run")


@pytest.mark.parametrize("command", ["pretrain", "plan", "compare", "ablate"])
def test_commands_with_settings_take_a_config_file(command):
    assert "--config" in accepted_flags(command)


def test_a_closed_pipe_is_not_an_error():
    process = subprocess.run(
        f"{shlex.quote(sys.executable)} -m snclr encoders | head -n 1", shell=True, capture_output=True, text=True
    )
    assert process.stderr == ""
    assert process.stdout.strip()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error_that_says_so():
    with open("/dev/full", "w") as full:
        process = subprocess.run([sys.executable, "-um", "snclr", "encoders"], stdout=full, stderr=-1, text=True)
    assert process.returncode == 2
    assert "snclr encoders: cannot read or write the output (No space left on device)" in process.stderr


def test_a_missing_permission_is_an_error_that_names_the_path(monkeypatch, tmp_path, capsys):
    def refuse(folder):
        raise PermissionError(errno.EACCES, "Permission denied", str(folder / "shards.json"))

    monkeypatch.setattr("snclr.data.shards.open.is_shard_folder", refuse)
    assert main(["pretrain", "--data", str(tmp_path), "--out", str(tmp_path / "run")]) == 2
    assert f"cannot read or write {tmp_path / 'shards.json'} (Permission denied)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flag", "default"),
    [("knn", "--seed", "0"), ("finetune", "--weight-decay", "0.0"), ("embed", "--workers", "0"),
     ("pretrain", "--seed", "0"), ("pack", "--seed", "0")],
)  # fmt: skip
def test_a_default_of_0_is_shown(command, flag, default, capsys):
    main([command, "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"[default: {default}]" in text.split(f" {flag} ", 1)[1].split(" --", 1)[0]
    assert "[default: False]" not in text
