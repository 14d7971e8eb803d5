from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from report_page import Taken
from tiny_run import train, write_images

import snclr
from snclr.cli import main
from snclr.commands.neighbors import neighbors
from snclr.commands.report import report
from snclr.errors import UserError
from snclr.evaluate.results import append_result
from snclr.train.metrics import read_metrics


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    return train(write_images(folder / "images"), folder / "run", log_every=1)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def written(run: Path, **options: Any) -> tuple[Taken, dict[str, Any]]:
    found = report(run, quiet=True, **options)
    return Taken(Path(found["report"]).read_text()), found


def test_a_page_of_a_complete_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append_result(run, "knn", {"top1": 0.912, "top5": None}, "weighted kNN: k = 20")
    assert main(["report", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["report"] == str(run / "report.html")
    assert found["missing"] == {}
    assert all(found["included"].values())
    assert (found["images"], found["evaluations"], found["bad_images"]) == (48, 1, 1)
    html = (run / "report.html").read_text()
    assert found["bytes"] == len(html.encode()) < 1_000_000
    taken = Taken(html)
    lines = read_metrics(run)
    data = taken.data("curves-data")
    for name in (
        "loss",
        "lr",
        "spread",
        "effective_rank",
        "same_class",
        "queue_knn",
        "positiveness_entropy",
        "neighbor_age",
    ):
        assert data[name]["value"] == [pytest.approx(line[name], rel=1e-5) for line in lines if name in line]
    assert "red/broken.png" in taken.text()
    assert "91.20%" in taken.text()
    assert {"blue", "green", "red"} == set(taken.data("map-data")["classes"])
    assert sorted(taken.data("map-data")["names"])[0] == "blue/blue_0.png"
    assert len(taken.all("img")) == 6 * (1 + 5)


def test_the_same_run_gives_the_same_page(run: Path, tmp_path: Path) -> None:
    pages = [report(run, out=tmp_path / f"{n}.html", cache=False, quiet=True)["report"] for n in range(2)]
    first, second = (re.sub(r"Written [^<]* by", "", Path(one).read_text()) for one in pages)
    assert first == second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.html", "1.html", "run"]


def test_the_gallery_is_that_of_snclr_neighbors(run: Path) -> None:
    computed, _ = written(run, cache=False)
    table = neighbors(run, rows=6, k=5, seed=0, quiet=True, cache=False)
    shown, _ = written(run, embeddings=False)
    assert shown.all("img") == computed.all("img")  # the same images with the same neighbours, in the same order
    assert table["protocol"] in " ".join(text for tag, text in shown.texts if tag == "p")
    weights = [f"{one['w']:.3f}" for row in table["rows"] for one in row["neighbors"]]
    for taken in (shown, computed):
        assert re.findall(r"w\u202f=\u202f([\d.]+)", taken.text()) == weights


def test_a_table_of_other_weights_or_other_images_is_not_shown(run: Path) -> None:
    neighbors(run, quiet=True, cache=False)
    table = run / "figures" / "neighbors.json"
    assert written(run, embeddings=False)[1]["included"]["neighbors"]
    saved = json.loads(table.read_text())
    for damage in (
        {"rows": 3},
        {"rows": [{**saved["rows"][0], "key": "other.png"}] * 6},
        {"protocol": None, "rows": [1]},
    ):
        table.write_text(json.dumps({**saved, **damage}))
        assert not written(run, embeddings=False)[1]["included"]["neighbors"]
    table.write_text(json.dumps(saved))
    assert written(run, embeddings=False)[1]["included"]["neighbors"]
    os.utime(table, (1, 1))  # drawn before the last checkpoint
    assert not written(run, embeddings=False)[1]["included"]["neighbors"]
    assert not written(run, embeddings=False, rows=7)[1]["included"]["neighbors"]


def test_a_sample_is_seeded_and_keeps_its_names(run: Path) -> None:
    first, found = written(run, images=20)
    again, _ = written(run, images=20)
    other, _ = written(run, images=20, seed=1)
    names = [one.data("map-data")["names"] for one in (first, again, other)]
    assert found["images"] == len(names[0]) >= 19  # one of them may be the broken one
    assert names[0] == names[1] != names[2]
    assert all(re.fullmatch(r"(blue|green|red)/\1_\d+\.png", one) for one in names[0])


def test_a_run_in_progress_has_a_page(run: Path) -> None:
    (run / "encoder.safetensors").unlink()
    taken, found = written(run)  # from the last checkpoint
    assert found["missing"] == {}
    assert "in progress" in taken.text()
    shutil.rmtree(run / "checkpoints")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 99, "epo')  # being written just now
    taken, found = written(run)
    assert set(found["missing"]) == {"neighbors", "map"}
    assert "no checkpoint yet" in found["missing"]["map"]
    assert "no checkpoint yet" in taken.text()
    assert found["included"]["curves"]
    (run / "metrics.jsonl").write_bytes(b"")
    assert "no line yet" in written(run)[1]["missing"]["curves"]
    (run / "metrics.jsonl").write_bytes(b"rubbish\n{}\n")
    assert "not a metrics record" in written(run)[1]["missing"]["curves"]


def test_images_that_are_gone_are_said_to_be(run: Path, tmp_path: Path) -> None:
    settings = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub(r"(?m)^data: .*$", f"data: {tmp_path / 'gone'}", settings))
    _, found = written(run)
    assert "no data set found" in found["missing"]["map"]
    assert found["included"]["curves"]
    images = write_images(tmp_path / "images", each=3)
    assert written(run, data=str(images))[1]["images"] == 9


def test_folders_with_hardly_an_image_have_a_page(run: Path, tmp_path: Path) -> None:
    images = tmp_path / "few"
    images.mkdir()
    (images / "broken.png").write_bytes(b"no image")
    for count in range(4):
        _, found = written(run, data=str(images), k=2)
        assert found["included"]["map"] is (count == 3)
        if count < 3:
            assert ("none of the 1 images" if count == 0 else f"has {count}") in found["missing"]["map"]
        assert found["included"]["neighbors"] is (count > 1)
        Image.new("RGB", (20, 20), (60 * count, 9, 9)).save(images / f"{count}.png")


def test_alerts_say_what_went_wrong(run: Path) -> None:
    lines = read_metrics(run)
    lines[1]["collapsed"] = lines[2]["collapsed"] = True
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "nonfinite.json").write_text(json.dumps({"step": 7, "loss": "<nan>", "gradient_norm": "inf", "ids": [1]}))
    text = written(run, embeddings=False)[0].text()
    assert f"at 2 logged steps, first at step {lines[1]['step']}, last at step {lines[2]['step']}" in text
    assert "stopped at step 7: loss <nan>" in text


def test_names_of_real_files_and_folders_cannot_harm(tmp_path: Path) -> None:
    bad = '<img src=x onerror="window.canary=1">'
    images = tmp_path / "images"
    for number, label in enumerate([bad, "b\u202e&'b\n"]):
        (images / label).mkdir(parents=True)
        for n in range(8):
            pixels = np.random.default_rng(n + 10 * number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(images / label / f"{n}<script>window.canary=2;.png")
    (images / bad / "bad<script>.png").write_bytes(b"x")
    run = train(images, tmp_path / bad, epochs=1, warmup_epochs=0, batch_size=8)
    taken, found = written(run, images=10, rows=2, k=2)
    assert found["missing"] == {}
    assert len(taken.all("script")) == 3
    assert len(taken.all("img")) == 6
    assert all((one["src"] or "").startswith("data:image/") and "onerror" not in one for one in taken.all("img"))
    assert bad in taken.text()
    assert "b\\u202e&'b\\x0a" in taken.text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"images": 2}, "images is 2; a page takes 3 to 5,000"), ({"rows": 0}, "rows is 0"), ({"k": 21}, "k is 21"),
        ({"out": "page.png"}, "must be a file that ends in .html"),
        ({"out": "none/page.html"}, "there is no folder none"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_for(trained: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        report(trained, **options)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert main(["report", str(tmp_path / "nothing")]) == 2
    said = capsys.readouterr().err
    assert "is not a run of snclr" in said
    assert "there is no run folder" in said
    assert list(tmp_path.iterdir()) == []


def test_the_function_has_the_packages_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert snclr.report.page  # type: ignore[attr-defined]
    assert snclr.report(run, embeddings=False, quiet=True)["missing"].keys() == {"neighbors", "map"}  # type: ignore[operator]
    assert main(["report", str(run), "--no-embeddings", "--out", str(run / "short.html")]) == 0
    said = capsys.readouterr().out
    assert "wrote" in said
    assert "without map: features were not asked for" in said


def test_the_help_loads_no_torch() -> None:
    code = (
        "import sys; from snclr.cli import main\n"
        "try: main(['report', '--help'])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--no-embeddings" in done.stdout
