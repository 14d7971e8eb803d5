"""`snclr pack`: shards that WebDataset reads, hashes that detect damage, and resuming an interrupted pack."""

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
from webdataset.tariterators import group_by_keys, tar_file_expander

from snclr.api.export import pack, verify_shards
from snclr.cli import main as cli
from snclr.data.datasets.base import open_dataset
from snclr.data.shards import pack as pack_module
from snclr.data.shards.manifest import MANIFEST
from snclr.errors import UserError
from tests.helpers.shard_data import jpeg, make_folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SNCLR_CACHE", str(tmp_path / "cache"))


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_pack_writes_shards_an_index_and_a_manifest(tmp_path):
    make_folder(tmp_path / "f", count=10)
    done = pack(tmp_path / "f", shards=tmp_path / "s", images_per_shard=4, quiet=True)
    assert (done.images, done.files) == (10, 3)
    assert sorted(digests(tmp_path / "s")) == [
        "index.safetensors", "shard-00000.tar", "shard-00001.tar", "shard-00002.tar", MANIFEST,
    ]  # fmt: skip
    manifest = json.loads((tmp_path / "s" / MANIFEST).read_text())
    assert manifest["classes"] == ["cat", "dog"]
    assert manifest["images"] == 10
    found = digests(tmp_path / "s")
    assert all(found[entry["name"]] == entry["sha256"] for entry in manifest["shards"])
    dataset = open_dataset(tmp_path / "s")
    for index in range(10):
        assert dataset.read(index) == (tmp_path / "f" / dataset.key(index)).read_bytes()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def read_by_webdataset(paths):
    """Yield the samples of tars; WebDataset does not close files, so they are opened here."""
    for path in paths:
        with open(path, "rb") as file:
            yield from group_by_keys(tar_file_expander([{"url": str(path), "stream": file}]))


def test_webdataset_reads_packed_shards(tmp_path):
    make_folder(tmp_path / "f", count=6)
    (tmp_path / "f" / "cat" / "000.png").write_bytes(jpeg(50))  # the same name with another suffix
    (tmp_path / "f" / "dog" / "v1.2.JPG").write_bytes(jpeg(51))
    long = "x" * 120 + ".jpg"
    (tmp_path / "f" / "dog" / long).write_bytes(jpeg(52))
    pack(tmp_path / "f", shards=tmp_path / "s", images_per_shard=5, quiet=True)
    samples = list(read_by_webdataset(sorted((tmp_path / "s").glob("*.tar"))))
    assert len(samples) == 9
    assert len({sample["__key__"] for sample in samples}) == 9
    stored = {sample.get("jpg") or sample["png"] for sample in samples}
    assert stored == {path.read_bytes() for path in (tmp_path / "f").rglob("*.*")}
    for sample in samples:
        assert int(sample["cls"]) == (1 if sample["__key__"].startswith("dog/") else 0)
    renamed = {json.loads(sample["json"])["file"] for sample in samples if "json" in sample}
    assert renamed == {"cat/000.png", "dog/v1.2.JPG"}
    dataset = open_dataset(tmp_path / "s")
    assert {dataset.key(i) for i in range(9)} >= {"cat/000.png", "dog/v1.2.JPG", f"dog/{long}"}
    plain = open_dataset(f"{tmp_path}/s/*.tar")  # without the manifest
    assert sorted(map(plain.read, range(9))) == sorted(map(dataset.read, range(9)))


def test_packing_is_deterministic_and_shuffles_classes(tmp_path):
    make_folder(tmp_path / "f", count=40)
    for out, workers in (("a", 1), ("b", 3)):
        pack(tmp_path / "f", shards=tmp_path / out, images_per_shard=10, workers=workers, quiet=True)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    pack(tmp_path / "f", shards=tmp_path / "c", images_per_shard=10, shuffle=False, quiet=True)
    plain, mixed = open_dataset(f"{tmp_path}/c/shard-00000.tar"), open_dataset(f"{tmp_path}/a/shard-00000.tar")
    assert set(plain.classes) == {"0"}
    assert set(mixed.classes) == {"0", "1"}
    assert json.loads((tmp_path / "c" / MANIFEST).read_text())["seed"] is None


def test_shards_are_limited_by_size(tmp_path):
    make_folder(tmp_path / "f", count=20)
    pack(tmp_path / "f", shards=tmp_path / "s", shard_size="20KB", quiet=True)
    sizes = [path.stat().st_size for path in (tmp_path / "s").glob("*.tar")]
    assert len(sizes) > 1
    assert max(sizes) <= 20_000 + 10_240


def test_check_skips_unreadable_images(tmp_path):
    make_folder(tmp_path / "f", count=8, bad=(3, 4))
    done = pack(tmp_path / "f", shards=tmp_path / "s", check=True, quiet=True)
    assert done.images == 6
    assert {skip.key for skip in done.skipped} == {"cat/004.jpg", "dog/003.jpg"}
    assert len(open_dataset(tmp_path / "s")) == 6
    unchecked = pack(tmp_path / "f", shards=tmp_path / "t", quiet=True)
    assert unchecked.images == 8


def test_an_interrupted_pack_resumes_with_the_same_result(tmp_path, monkeypatch):
    make_folder(tmp_path / "f", count=20)
    pack(tmp_path / "f", shards=tmp_path / "whole", images_per_shard=4, quiet=True)
    written = []
    original = pack_module.write_shard

    def counted(path, examples):
        written.append(path.name)
        if len(written) == 3:
            raise KeyboardInterrupt
        return original(path, examples)

    monkeypatch.setattr(pack_module, "write_shard", counted)
    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path / "f", shards=tmp_path / "s", images_per_shard=4, workers=1, quiet=True)
    assert not (tmp_path / "s").exists()
    done = written[:2]
    (tmp_path / ".s.packing" / "shard-00004.tar.partial").write_bytes(b"half")
    written[:] = ["skip the stop"] * 3
    pack(tmp_path / "f", shards=tmp_path / "s", images_per_shard=4, workers=1, quiet=True)
    assert not set(done) & set(written)
    assert digests(tmp_path / "s") == digests(tmp_path / "whole")


def test_a_pack_of_a_changed_folder_starts_over(tmp_path, monkeypatch):
    make_folder(tmp_path / "f", count=8)
    monkeypatch.setattr(pack_module, "write_manifest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path / "f", shards=tmp_path / "s", images_per_shard=4, quiet=True)
    monkeypatch.undo()
    (tmp_path / "f" / "cat" / "000.jpg").write_bytes(jpeg(99))
    pack(tmp_path / "f", shards=tmp_path / "s", images_per_shard=4, quiet=True)
    assert open_dataset(tmp_path / "s").read(0) == jpeg(99)


def test_only_shards_are_overwritten_and_only_on_request(tmp_path):
    make_folder(tmp_path / "f", count=4)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("text")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="not written by"):
            pack(tmp_path / "f", shards=tmp_path / "mine", overwrite=overwrite, quiet=True)
    assert (tmp_path / "mine" / "thesis.txt").exists()
    (tmp_path / "s").mkdir()  # empty: fine
    pack(tmp_path / "f", shards=tmp_path / "s", quiet=True)
    with pytest.raises(UserError, match="--overwrite"):
        pack(tmp_path / "f", shards=tmp_path / "s", quiet=True)
    (tmp_path / "f" / "cat" / "new.jpg").write_bytes(jpeg(9))
    pack(tmp_path / "f", shards=tmp_path / "s", overwrite=True, quiet=True)
    assert len(open_dataset(tmp_path / "s")) == 5
    assert (
        sorted(path.name for path in tmp_path.iterdir()) == ["cache", "f", "mine", "s"]
        or not (tmp_path / "cache").exists()
    )


def test_verify_detects_changed_truncated_and_missing_shards(tmp_path):
    make_folder(tmp_path / "f", count=12)
    pack(tmp_path / "f", shards=tmp_path / "s", images_per_shard=3, quiet=True)
    assert verify_shards(tmp_path / "s", quiet=True).wrong == []
    shards = sorted((tmp_path / "s").glob("*.tar"))
    flipped = bytearray(shards[0].read_bytes())
    flipped[700] ^= 1
    shards[0].write_bytes(flipped)
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    shards[2].unlink()
    wrong = verify_shards(tmp_path / "s", quiet=True).wrong
    assert len(wrong) == 3
    assert "content has changed" in wrong[0]
    assert "content has changed" in wrong[1]
    assert "No such file" in wrong[2]


def test_lists_and_names_that_are_not_utf8_are_packed(tmp_path):
    name = os.fsdecode(b"caf\xe9.jpg")
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / name).write_bytes(jpeg(1))
    (tmp_path / "out.jpg").write_bytes(jpeg(2))
    pack(tmp_path / "f", shards=tmp_path / "s", quiet=True)
    assert open_dataset(tmp_path / "s").key(0) == "caf\\udce9.jpg"
    (tmp_path / "f" / "list.txt").write_text(f"../out.jpg\tx\n{tmp_path}/out.jpg\ty\n")
    pack(tmp_path / "f" / "list.txt", shards=tmp_path / "t", quiet=True)
    dataset = open_dataset(tmp_path / "t")
    assert dataset.classes == ["x", "y"]
    assert dataset.read(0) == dataset.read(1) == jpeg(2)
    assert len(open_dataset(f"{tmp_path}/t/*.tar")) == 2


def test_the_pack_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("snclr.runtime.progress._BRIEF_SECONDS", 0.0)  # print the progress of a short job
    make_folder(tmp_path / "f", count=6, bad=(1,))
    assert cli.main(["pack", str(tmp_path / "f"), "--shards", str(tmp_path / "s"), "--check"]) == 0
    printed = capsys.readouterr()
    assert "5 images in 1 shard," in printed.out
    assert "dog/001.jpg" in printed.out
    assert "packing" in printed.err
    assert cli.main(["pack", "--verify", str(tmp_path / "s")]) == 0
    assert "intact (sha256): 1 shard with 5 images" in capsys.readouterr().out
    (tmp_path / "s" / "shard-00000.tar").write_bytes(b"")
    assert cli.main(["pack", "--verify", str(tmp_path / "s"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["wrong"]
    for arguments in (["pack"], ["pack", "x"], ["pack", "demo", "--shards", str(tmp_path / "t")],
                  ["pack", "--verify", str(tmp_path)], ["pack", "x", "--verify", "y"]):  # fmt: skip
        assert cli.main(arguments) == 2
    assert cli.main(["pack", str(tmp_path / "f"), "--shards", str(tmp_path / "t"), "--shard-size", "x"]) == 2
    assert "number of bytes" in capsys.readouterr().err


def test_ctrl_c_prints_the_command_that_continues(tmp_path, monkeypatch, capsys):
    make_folder(tmp_path / "my photos", count=12)
    with monkeypatch.context() as patch:
        original = pack_module.write_shard
        written = []

        def interrupted(path, examples):
            written.append(path.name)
            if len(written) >= 2:
                raise KeyboardInterrupt
            return original(path, examples)

        patch.setattr(pack_module, "write_shard", interrupted)
        shards = tmp_path / "my shards"
        given = ["pack", str(tmp_path / "my photos"), "--shards", str(shards), "--images-per-shard=4", "--workers=1"]
        assert cli.main(given) == 130
    said, command = capsys.readouterr().err.splitlines()[-2:]
    assert said == "stopped by SIGINT; finished shards are kept. Continue with:"
    assert not shards.exists()
    (kept,) = tmp_path.glob(".my shards.packing/**/*.tar")
    before = kept.stat().st_mtime_ns
    assert cli.main(shlex.split(command)[1:]) == 0
    assert len(open_dataset(shards)) == 12
    assert before in {path.stat().st_mtime_ns for path in shards.glob("*.tar")}


# A folder with splits


def make_parts(top):
    make_folder(top / "train", count=24)
    make_folder(top / "val", count=12)
    return top


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


SLOW = """
import sys, time
from snclr.api.export import pack, verify_shards
from snclr.cli import main as cli
from snclr.data.shards import pack as pack_module
original = pack_module.write_shard
def slow(path, examples):
    note = original(path, examples)
    if path.parent.name == sys.argv[1]:
        time.sleep(100)  # until the signal
    return note
pack_module.write_shard = slow
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(("part", "number"), [("train", signal.SIGKILL), ("val", signal.SIGTERM)])
@pytest.mark.parametrize("flags", [(), ("--overwrite",)])
def test_a_killed_pack_of_splits_resumes_with_the_same_bytes(tmp_path, part, number, flags):
    make_parts(tmp_path / "f")
    pack(tmp_path / "f", shards=tmp_path / "whole", images_per_shard=4, quiet=True)
    out = tmp_path / "s"
    if flags:  # earlier shards, which stay until the new ones are complete
        make_parts(tmp_path / "old")
        (tmp_path / "old" / "train" / "cat" / "more.jpg").write_bytes(jpeg(77))
        pack(tmp_path / "old", shards=out, quiet=True)
    before = tree(out)
    arguments = ["pack", str(tmp_path / "f"), "--shards", str(out), "--images-per-shard", "4", "--workers", "1", *flags]
    killed = subprocess.Popen([sys.executable, "-c", SLOW, part, *arguments], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while len(list(tmp_path.glob(f".s.packing/**/{part}/*.tar"))) < 1:
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    killed.send_signal(number)
    assert killed.wait(200) == -number
    assert tree(out) == before
    finished = {path.relative_to(tmp_path): path.stat().st_mtime_ns for path in tmp_path.glob(".s.packing/**/*.tar")}
    assert finished
    assert cli.main(arguments) == 0
    assert tree(out) == tree(tmp_path / "whole")
    times = {path.stat().st_mtime_ns for path in out.rglob("*.tar")}
    assert times >= set(finished.values())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("moment", ["os.rename", "snclr.data.shards.pack.remove_partial"])
def test_a_kill_during_the_final_rename_loses_nothing(tmp_path, monkeypatch, moment):
    make_parts(tmp_path / "f")
    pack(tmp_path / "f", shards=tmp_path / "s", seed=5, quiet=True)
    pack(tmp_path / "f", shards=tmp_path / "whole", images_per_shard=4, quiet=True)
    calls = []
    plain = os.rename

    def killed(*names):
        calls.append(names)
        if moment != "os.rename" or len(calls) == 2:  # the old shards are moved, the new ones are not
            raise KeyboardInterrupt
        plain(*names)

    with monkeypatch.context() as patch:
        patch.setattr(moment, killed)
        with pytest.raises(KeyboardInterrupt):
            pack(tmp_path / "f", shards=tmp_path / "s", images_per_shard=4, overwrite=True, quiet=True)
    if moment == "os.rename":
        monkeypatch.setattr(pack_module, "write_shard", lambda *_: pytest.fail("a shard was written twice"))
        pack(tmp_path / "f", shards=tmp_path / "s", images_per_shard=4, overwrite=True, quiet=True)
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert tree(tmp_path / "s") == tree(tmp_path / "whole")


def test_splits_replace_a_single_folder_and_vice_versa(tmp_path, monkeypatch):
    make_parts(tmp_path / "f")
    make_folder(tmp_path / "g", count=8)
    for first, second in (("f", "g"), ("g", "f")):
        with monkeypatch.context() as patch:
            patch.setattr(pack_module, "write_manifest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                pack(tmp_path / first, shards=tmp_path / "s", overwrite=True, quiet=True)
        pack(tmp_path / second, shards=tmp_path / "s", overwrite=True, quiet=True)
        pack(tmp_path / second, shards=tmp_path / f"whole-{second}", quiet=True)
        assert tree(tmp_path / "s") == tree(tmp_path / f"whole-{second}")


def test_an_unwritable_output_is_reported(tmp_path, capsys):
    make_folder(tmp_path / "f", count=2)
    assert cli.main(["pack", str(tmp_path / "f"), "--shards", "/proc/nope/s"]) == 2
    assert "cannot write" in capsys.readouterr().err
