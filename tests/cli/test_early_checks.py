"""Bad values and typed paths are reported before torch is imported, so also at once when the output is piped."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import snclr
from snclr.api import early_checks
from snclr.api.early_checks import check_data, check_device
from snclr.checkpoint.run_dir import RunDir
from snclr.data.datasets.base import check_spec, open_dataset
from snclr.errors import UserError, similar_path
from snclr.models.names import check_name

MISTAKES = {
    "pretrain --data {images} --out {tmp}/r --epochs 0": "--epochs must be a whole number (at least 1), not 0",
    "pretrain --data {images} --out {tmp}/r --encoder-size 3": "unknown option",
    "pretrain --data {images} --out {tmp}/r --epochs 2.5": '"2.5" is not a whole number',
    "pretrain --data {images} --out {tmp}/r --device gpu": "there is no device 'gpu' (did you mean 'cuda'?)",
    "pretrain --data {images} --out {tmp}/r --encoder resnet-50": "timm (did you mean 'resnet50'?)",
    "pretrain --data {images} --out {tmp}/r --encoder vit_smal": "timm (did you mean 'vit_small'?)",
    "pretrain --data {images} --out {tmp}/r --encoder resnet18.a1_in1k": "so use 'resnet18'",
    "plan --data {images} --encoder convnext_tinny": "timm (did you mean 'convnext_tiny'?)",
    "pretrain --data {images} --out {tmp}/r --init-from {run}x": "there is no {run}x (did you mean '{run}'?)",
    "neighbors {run} missing.jpg": "there is no file or folder missing.jpg",
    "pretrain --data {images} --out {tmp}/r --colour 3": "unknown option --colour.\n",
    "explore {run} --port 70000": "--port must be from 0 to 65535, not 70000",
    "pretrain --data {images} --out /proc/x": "cannot write /proc/x",
    "pretrain --data {images} --out /dev/null/x": "cannot write /dev/null/x (/dev/null is not a folder); choose",
    "pretrain --data {images} --out {tmp}/r --method Sim-CLRR": "for --method (did you mean 'simclr'?). Choose from",
    "pretrain --data {images}": "out is missing",
    "pretrain --out {tmp}/r": "data is missing",
    "pretrain --data {typo} --out {tmp}/r": "(did you mean '{images}'?)",
    "pretrain --data {images} --out {run}": "already contains a run",
    "pretrain --data {images} --out {images}": "not a run of snclr",
    "pretrain --resume --out {run}x": "there is no run to resume in {run}x (did you mean '{run}'?)",
    "pretrain --resume": "--out is missing",
    "pretrain --resume {run}": ". Did you mean --out {run}?\n",
    "pretrain --data s/0.tar s/1.tar s/2.tar --out {tmp}/r": "s/1.tar s/2.tar. Put quotes around the shards, so that",
    "pretrain --resume --out {run} --epochs 9": "has --epochs 2, not --epochs 9",
    "pretrain --data {images} --out {tmp}/r --batch-size 700": "fewer than one batch of 700",
    "pretrain --data {images} --out {tmp}/r --neighbors 300": "--neighbors 300 must be below the number of images",
    "pretrain --data {images}/red/red_1.png --out {tmp}/r": "is a single image",
    "pretrain --data {images} --out {tmp}/r --config none.yaml": "there is no settings file none.yaml",
    "plan --data {typo}": "(did you mean '{images}'?)",
    "plan --data {images} --steps 0": "--steps must be at least 1",
    "plan --data {images} --batch-size 700": "700",
    "plan --data {images} --neighbors 300": "--neighbors 300 must be below the number of images",
    "knn {run}x": "(did you mean '{run}'?)",
    "knn {run} --k 0": "--k must be at least 1, not 0",
    "knn {run} --temperature 0": "--temperature must be above 0, not 0",
    "knn {run} --data {typo}": "(did you mean '{images}'?)",
    "knn {run} --test {typo}": "(did you mean '{images}'?)",
    "knn {run} --data {images}/red": "the training images ({images}/red) have no labels. To label them, put the images",
    "fewshot {run} --test {images}/red": "the test images ({images}/red) have no labels",
    "linear {run} --epochs 0": "--epochs must be at least 1, not 0",
    "linear {run} --lr -1": "--lr must be above 0, not -1",
    "finetune {run} --batch-size 0": "--batch-size must be at least 1, not 0",
    "finetune {run} --labels 10": "--labels '10' is neither a share such as 1% or 10% nor a file",
    "finetune {run} --labels 0.1": "one image name per line (did you mean '10%'?)",
    "finetune {run} --labels 120%": "--labels 120% is not a share of the images",
    "fewshot {run} --draws 0": "--draws must be at least 1, not 0",
    "neighbors {run} --rows 0": "--rows must be at least 1, not 0",
    "neighbors {run} --candidates {typo}": "(did you mean '{images}'?)",
    "neighbors {run} --out figure.pdf": "--out figure.pdf ends in '.pdf'; use .png",
    "search {run} missing.jpg": "there is no file or folder missing.jpg, and {images} has no image with that key",
    "search {run} missing.jpg --data {images}": "there is no file or folder missing.jpg",
    "explain {run} missing.jpg": "there is no file or folder missing.jpg",
    "explain {run} {images}": "{images} is a folder; give one image",
    "explain {run} {broken}": "{broken} cannot be read: not an image of a known format",
    "explain {run} {photo} --device gpu": "there is no device 'gpu'",
    "search {run} {broken}": "{broken} cannot be read: ",
    "neighbors {run} {broken}": "{broken} cannot be read: ",
    "search {run} a.jpg --k 0": "--k must be at least 1, not 0",
    "explain {run} a.jpg --out /proc/x.png": "cannot write /proc/x.png",
    "embed {run} --out a.npy --batch-size 0": "--batch-size must be at least 1, not 0",
    "embed {run} --out a.csv": "--out a.csv ends in '.csv'; use .npy or .npz or .parquet",
    "embed {run} --out /proc/a.npy": "cannot write /proc/a.npy",
    "neighbors {run} --k 101": "--k must be at least 1 and at most 100, not 101",
    "neighbors {run} --neighbours 101": "--neighbors must be at least 1 and at most 100, not 101",
    "neighbors {run} --neighbors=0": "--neighbors must be at least 1 and at most 100, not 0",
    "neighbors {run} --neighbor 3": "unknown option --neighbor. Did you mean --neighbors?",
    "search {run} a.jpg --out /proc/x.png": "cannot write /proc/x.png",
    "report {run}x": "(did you mean '{run}'?)",
    "report {run} {run}x": "(did you mean '{run}'?)",
    "report {run} {run}": "a run was given twice",
    "report {run} {run} --data {images}": "--data and --class-names apply to the report of one run",
    "report {run} --device gpu": "there is no device 'gpu'",
    "report {run} --neighbours 300": "--neighbors must be at least 1 and at most 20, not 300",
    "report {run} --out page.pdf": "--out page.pdf ends in '.pdf'",
    "report {run} --class-names none.txt": "cannot read the class names in none.txt",
    "export {run} --to timm --out /proc/x": "cannot write /proc/x",
    "explore {run} --static /proc/x": "cannot write /proc/x (No such file or directory); choose another --static",
    "curate {run} --out /proc/x.txt": "cannot write /proc/x.txt",
    "import none.pth --encoder resnet18 --out {tmp}/i": "there is no none.pth",
    "compare --data {images} --out /proc/x": "cannot write /proc/x",
    "compare --data {images} --out {tmp}/c --seeds 0": "--seeds 0 gives no seed. Give a number of seeds (3) or",
    "compare --data {images} --out {tmp}/c --methods snclrr": "there is no method 'snclrr' (did you mean 'snclr'?)",
    "export {run} --to tim": "there is no format 'tim' (did you mean 'timm'?)",
    "knn {runs}": "{runs} is a folder of runs. Give one of them: run.",
    "export {run}x --to timm": "(did you mean '{run}'?)",
    "explore {run} --gallery {typo}": "(did you mean '{images}'?)",
    "curate {run} --out {tmp}/l.txt --number 0": "--number must be at least 1, not 0",
}


def test_mistakes_are_reported_without_torch(run, images, tmp_path):
    """One process for all of them: the first that imports torch is named."""
    names = {
        "images": images,
        "run": run,
        "runs": run.parent,
        "tmp": tmp_path,
        "photo": images / "red/red_1.png",
        "broken": tmp_path / "broken.jpg",
        "typo": images.with_name(images.name[1:]),
    }
    names["broken"].write_text("no image")
    commands = [[part.format(**names) for part in command.split()] for command in MISTAKES]
    code = (
        "import contextlib, io, json, sys\n"
        "from snclr.cli.main import main\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as error:\n"
        "        code = main(argv)\n"
        "    print(json.dumps([code, 'torch' in sys.modules, error.getvalue()]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)], capture_output=True, text=True, timeout=280, check=True
    )
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    for command, message, (exit_code, has_torch, error) in zip(MISTAKES, MISTAKES.values(), outcomes, strict=True):
        assert exit_code == 2, (command, error)
        assert message.format(**names) in error, (command, error)
        assert not has_torch, command


def test_a_run_directory_in_use_is_reported_early(images, tmp_path):
    settings = {"data": str(images), "out": str(tmp_path / "run"), "batch_size": 8, "neighbors": 5}
    with (
        RunDir.create(tmp_path / "run"),
        pytest.raises(UserError, match=f"in use by a running job: process {os.getpid()}"),
    ):
        early_checks.check_pretrain(settings, None)
    early_checks.check_pretrain(settings, None)


def test_the_device_is_checked_without_torch_if_there_is_no_driver_of_a_gpu(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(early_checks, "has_gpu_driver", lambda: True)
    check_device("cuda", "bf16")  # whether torch supports this GPU is known later
    monkeypatch.setattr(early_checks, "has_gpu_driver", lambda: False)
    check_device("auto")
    with pytest.raises(UserError, match=r"^there is no device 'cuda:1' on this machine; choose auto or cpu$"):
        check_device("cuda:1")
    with pytest.raises(UserError, match=r"^precision bf16 is not supported on CPUs.* Give --precision 32\.$"):
        check_device("auto", "bf16-mixed")


def test_names_of_encoders_pass_the_early_check():
    for name in snclr.list_encoders()[::50]:
        check_name(name)


def test_a_hub_that_cannot_be_reached_is_reported_without_its_library(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("socket.create_connection", mock.Mock(side_effect=OSError(113, "No route to host")))
    with pytest.raises(UserError, match=r"cannot be reached \(No route to host\), and it is not in the local cache"):
        check_data("hf:owner/name")
    (tmp_path / ".cache/huggingface/hub/datasets--owner--Name").mkdir(parents=True)
    check_data("hf:owner/name")  # the library looks into the cache


@pytest.mark.parametrize(
    ("typed", "found"),
    [("my-fotos", "my-photos"), ("my-photos/trian", "my-photos/train"), ("my-fotos/train", "my-photos/train")],
)
def test_a_misspelled_folder_is_suggested(typed, found, tmp_path, monkeypatch):
    (tmp_path / "my-photos" / "train").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert similar_path(Path(typed)) == f" (did you mean {found!r}?)"
    for opening in (open_dataset, check_spec):
        with pytest.raises(UserError, match=f"no dataset found for '{typed}' .did you mean '{found}'"):
            opening(typed)


def test_nothing_is_suggested_for_a_path_that_is_like_no_other(tmp_path):
    (tmp_path / "my-photos").mkdir()
    assert similar_path(tmp_path / "zzz") == similar_path(tmp_path / "my-photos") == ""


@pytest.mark.parametrize(
    "spec", ["demo", "demo#fit", "CIFAR10", "hf:owner/name", "shards/{000..003}.tar", "s3://bucket/a.tar"]
)
def test_names_and_addresses_are_not_looked_up(spec):
    check_spec(spec)
