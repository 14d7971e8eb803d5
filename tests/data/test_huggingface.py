"""Hugging Face datasets, built locally: columns, splits, resumed runs and refused kinds."""

import os
import pickle
import signal
import socket
import subprocess
import sys

import pytest

from snclr.cli.main import main
from snclr.data.datasets.base import open_dataset
from snclr.data.datasets.huggingface import HuggingFaceDataset, Spec, parse_spec
from snclr.data.decode import BadImage
from snclr.data.loader import ViewLoader
from snclr.data.splits import open_splits
from snclr.data.transforms.views import VIEW_GROUPS
from snclr.errors import UserError
from tests.helpers.shard_data import BAD, jpeg, make_folder

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the library


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("SNCLR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def table(count=10, bad=(), names=("ant", "bee"), **more):
    cells = [{"bytes": BAD if n in bad else jpeg(n), "path": f"{n:02d}.jpg"} for n in range(count)]
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(names))}
    columns = {"image": cells, "label": [n % len(names) for n in range(count)]}
    for name, (values, kind) in more.items():
        columns[name], kinds[name] = values, kind
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


def batches(source):
    loader = ViewLoader(source, views=VIEW_GROUPS["byol"], image_size=16, batch_size=5, seed=1, max_bad_share=0.9)
    return list(loader.batches(0, 3)), loader.skipped


def test_a_folder_of_save_to_disk_is_opened(tmp_path):
    table(bad=(4,)).save_to_disk(str(tmp_path / "saved"))
    source = open_dataset(f"hf:{tmp_path}/saved")
    assert isinstance(source, HuggingFaceDataset)
    assert len(source) == 10
    assert source.classes == ["ant", "bee"]
    assert source.labels.tolist() == [0, 1] * 5
    assert source.load(3).shape == (20, 24, 3)
    assert source.key(3).endswith("/3/03.jpg")
    with pytest.raises(BadImage):
        source.load(4)
    again = pickle.loads(pickle.dumps(source))
    assert again.fingerprint() == source.fingerprint()
    _, skipped = batches(source)
    assert [skip.index for skip in skipped] == [4]


def test_splits_are_selected_by_name(tmp_path):
    parts = datasets.DatasetDict({"train": table(8), "validation": table(4)})
    parts.save_to_disk(str(tmp_path / "d"))
    spec = f"hf:{tmp_path}/d"
    assert len(open_dataset(spec)) == 8
    assert len(open_dataset(f"{spec}:validation")) == 4
    assert len(open_dataset(spec, split="test")) == 4
    train, test, description = open_splits(spec)
    assert (len(train), len(test)) == (8, 4)
    assert "its own" in description
    train, test, _ = open_splits(f"{spec}:train")
    assert len(train) + len(test) == 8
    with pytest.raises(UserError, match="no split 'all'; it has train, validation"):
        open_dataset(spec, split="all")


def test_slices_of_saved_splits_are_opened(tmp_path):
    datasets.DatasetDict({"train": table(8), "val": table(4)}).save_to_disk(str(tmp_path / "d"))
    table(10).save_to_disk(str(tmp_path / "one"))
    many, one = f"hf:{tmp_path}/d", f"hf:{tmp_path}/one"
    for spec, count in ((many + ":train[:2]", 2), (many + ":train[75%:]", 2), (many + ":train+val", 12),
                        (one + ":train", 10), (one + ":train[:2]", 2), (one + ":train[-3:]", 3)):  # fmt: skip
        assert len(open_dataset(spec)) == count, spec
    whole = open_dataset(one)
    assert (open_dataset(one + ":train[7:]").load(0) == whole.load(7)).all()
    for spec, message in (
        (many + ":validation", "no split 'validation'; it has train, val. Name one"),
        (many + ":validation[:2]", "it has train, val"),
        (many + ":train[two]", r"such as train\[:100\]"),
        (one + ":test", "no split 'test'; it has train"),
        (one + ":test[:2]", "it has train"),
    ):
        with pytest.raises(UserError, match=message):
            open_dataset(spec)


def test_a_saved_split_keeps_its_name(tmp_path):
    table(6).to_parquet(str(tmp_path / "a.parquet"))
    files = {"test": str(tmp_path / "a.parquet")}
    datasets.load_dataset("parquet", data_files=files, split="test").save_to_disk(str(tmp_path / "d"))
    assert len(open_dataset(f"hf:{tmp_path}/d:test[:4]")) == 4
    assert len(open_dataset(f"hf:{tmp_path}/d")) == 6  # the only split is used for training
    with pytest.raises(UserError, match="it has test"):
        open_dataset(f"hf:{tmp_path}/d:train")


def test_columns_are_found_or_chosen(tmp_path):
    more = {"thumb": ([{"bytes": jpeg(50 + n), "path": None} for n in range(10)], datasets.Image())}
    more["name"] = ([f"n{n % 3}" for n in range(10)], datasets.Value("string"))
    table(**more).save_to_disk(str(tmp_path / "d"))
    plain = open_dataset(f"hf:{tmp_path}/d")
    chosen = open_dataset(f"hf:{tmp_path}/d?image=thumb&label=name")
    assert (plain.load(2) != chosen.load(2)).any()
    assert chosen.classes == ["n0", "n1", "n2"]
    assert chosen.labels.tolist() == [n % 3 for n in range(10)]
    with pytest.raises(UserError, match="no column 'x'; it has image, label, thumb, name"):
        open_dataset(f"hf:{tmp_path}/d?image=x")
    table().select_columns(["label"]).save_to_disk(str(tmp_path / "none"))
    with pytest.raises(UserError, match="no image column"):
        open_dataset(f"hf:{tmp_path}/none")


def test_untyped_bytes_and_unknown_labels_are_read(tmp_path):
    plain = datasets.Dataset.from_dict({"jpg": [jpeg(n) for n in range(3)], "label": [0, None, -1]})
    plain.save_to_disk(str(tmp_path / "d"))
    assert open_dataset(f"hf:{tmp_path}/d").labels is None  # a number column is a label only on request
    source = open_dataset(f"hf:{tmp_path}/d?label=label")
    assert source.labels.tolist() == [0, -1, -1]
    assert source.load(2).shape == (20, 24, 3)


def test_the_fingerprint_follows_the_data(tmp_path):
    for name, data in (("a", table(4)), ("b", table(4)), ("c", table(4, bad=(2,))), ("d", table(4, names=("x", "y")))):
        data.save_to_disk(str(tmp_path / name))
    a, b, c, d = (open_dataset(f"hf:{tmp_path}/{name}").fingerprint() for name in "abcd")
    assert a == b
    assert len({a, c, d}) == 3


def test_loading_scripts_are_never_run(tmp_path):
    script = tmp_path / "evil" / "evil.py"
    script.parent.mkdir()
    script.write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    (tmp_path / "x.pkl").write_bytes(b"cos\nmkdir\n(S'" + str(tmp_path / "ran").encode() + b"'\ntR.")
    for spec in (f"{script.parent}", f"{script}", f"pandas?data_files={tmp_path}/x.pkl"):
        with pytest.raises(UserError):
            open_dataset(f"hf:{spec}")
    assert not (tmp_path / "ran").exists()


def test_old_libraries_and_missing_ones_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "__version__", "3.6.0")
    with pytest.raises(UserError, match="datasets>=4"):
        open_dataset("hf:owner/name")
    monkeypatch.setattr("importlib.import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    with pytest.raises(UserError, match=r"pip install 'snclr\[huggingface\]'"):
        open_dataset("hf:owner/name")


def test_dataset_names_are_parsed():
    assert parse_spec("hf:a/b").split is None
    assert parse_spec("hf:a/b@c:train[:10%]") == Spec("a/b", "c", "train[:10%]")
    assert parse_spec("hf:/data/x@y:val?label=z") == Spec("/data/x", "y", "val", {"label": "z"})
    for text in ("hf:", "hf:a?color=red", "hf:a?image="):
        with pytest.raises(UserError, match="write hf:OWNER/NAME"):
            parse_spec(text)


def test_an_imagefolder_is_opened_by_the_library(tmp_path):
    make_folder(tmp_path / "f", count=6)
    source = open_dataset(f"hf:imagefolder?data_dir={tmp_path}/f")
    assert source.classes == ["cat", "dog"]
    assert len(source) == 6
    assert source.load(0).shape == (20, 24, 3)


def test_a_revision_can_be_pinned(monkeypatch):
    options_given = {}

    def load_dataset(name, config, **options):
        options_given.update(options)
        return table()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    open_dataset("hf:owner/name:train?revision=4f2a9c1")
    assert options_given["revision"] == "4f2a9c1"


TINY = (
    "--recipe=demo", "--batch-size=8", "--epochs=3", "--image-size=16", "--queue-length=30", "--neighbors=3",
    "--hidden=16", "--dim=8", "--optimizer=sgd", "--lr=0.1", "--warmup-epochs=0", "--checkpoint-every=4",
    "--log-every=1", "--workers=0", "--threads=1", "--device=cpu",
)  # fmt: skip
KILLED = """
import os, signal, sys
from snclr.cli import main as cli
from snclr.train.pretrain_task import PretrainTask
step = PretrainTask.training_step
def kill_at_step_six(task, batch):
    if batch.step == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(task, batch)
PretrainTask.training_step = kill_at_step_six
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_result(tmp_path):
    table(count=24).to_parquet(str(tmp_path / "a.parquet"))
    command = ["pretrain", f"--data=hf:parquet?data_files={tmp_path}/a.parquet", *TINY]
    assert main([*command, f"--out={tmp_path / 'whole'}"]) == 0
    out = tmp_path / "killed"
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run([sys.executable, "-c", KILLED, *command, f"--out={out}"], env=environment, timeout=240)
    assert ended.returncode == -signal.SIGKILL
    assert not (out / "encoder.safetensors").exists()
    assert main(["pretrain", "--resume", f"--out={out}"]) == 0
    assert (out / "encoder.safetensors").read_bytes() == (tmp_path / "whole" / "encoder.safetensors").read_bytes()


def test_without_a_network_it_fails_at_once_with_one_sentence(monkeypatch, capsys):
    from huggingface_hub import constants

    with socket.socket() as closed:  # a port on which nobody listens
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("a retry of the hub client"))
        monkeypatch.setattr("urllib.request.getproxies", dict)
        assert main(["plan", "--data", "hf:nobody/nothing"]) == 2
    error = capsys.readouterr().err
    assert "hf:nobody/nothing cannot be opened: 127.0.0.1 cannot be reached (Connection refused)" in error
    assert error.count("\n") == 1
    assert (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE) == (False, False)
