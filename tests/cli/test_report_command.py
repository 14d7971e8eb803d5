from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import snclr
from snclr.api.report import report
from snclr.api.retrieval import neighbors
from snclr.cli.main import main
from snclr.errors import UserError
from snclr.evaluation.results import append_result
from snclr.reports.build import ReportResult
from snclr.train.metrics import read_metrics
from tests.helpers.report_page import ParsedPage
from tests.helpers.tiny_run import train, write_images


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    return train(write_images(folder / "images"), folder / "run", log_every=1)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def written(run: Path, **options: Any) -> tuple[ParsedPage, ReportResult]:
    result = report(run, quiet=True, **options)
    return ParsedPage(Path(result.report).read_text()), result


def test_the_report_of_a_complete_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append_result(run, "knn", {"top1": 0.912, "top5": None}, "weighted kNN: k = 20")
    assert main(["report", str(run), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["report"] == str(run / "report.html")
    assert result["missing"] == {}
    assert all(result["included"].values())
    assert (result["images"], result["evaluations"], result["bad_images"]) == (48, 1, 1)
    html = (run / "report.html").read_text()
    assert result["bytes"] == len(html.encode()) < 1_000_000
    parsed = ParsedPage(html)
    lines = read_metrics(run)
    data = parsed.data("curves-data")
    for name in ("loss", "lr", "spread", "effective_rank", "same_class", "queue_knn", "neighbor_age"):
        assert data[name]["value"] == [pytest.approx(line[name], rel=1e-5) for line in lines if name in line]
    assert "red/broken.png" in parsed.text()
    assert "91.20%" in parsed.text()
    assert {"blue", "green", "red"} == set(parsed.data("map-data")["classes"])
    assert sorted(parsed.data("map-data")["names"])[0] == "blue/blue_0.png"
    assert len(parsed.all("img")) == 6 * (1 + 5)


def test_the_report_is_deterministic(run: Path, tmp_path: Path) -> None:
    pages = [report(run, out=tmp_path / f"{n}.html", cache=False, quiet=True).report for n in range(2)]
    first, second = (re.sub(r"Written [^<]* by", "", Path(one).read_text()) for one in pages)
    assert first == second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.html", "1.html", "run"]


def test_the_gallery_is_that_of_snclr_neighbors(run: Path) -> None:
    parsed, _ = written(run, cache=False)
    table = neighbors(run, rows=6, k=5, seed=0, quiet=True, cache=False)
    weights = [f"{neighbor.w:.3f}" for row in table.rows for neighbor in row.neighbors]
    assert re.findall(r"w\u202f=\u202f([\d.]+)", parsed.text()) == weights
    keys = [image.key for row in table.rows for image in (row, *row.neighbors)]
    assert [(one["alt"] or "").partition(",")[0] for one in parsed.all("img")] == keys


def test_the_image_sample_is_seeded(run: Path) -> None:
    first, result = written(run, images=20)
    again, _ = written(run, images=20)
    other, _ = written(run, images=20, seed=1)
    names = [one.data("map-data")["names"] for one in (first, again, other)]
    assert result.images == len(names[0]) >= 19  # one of them may be the broken one
    assert names[0] == names[1] != names[2]
    assert all(re.fullmatch(r"(blue|green|red)/\1_\d+\.png", one) for one in names[0])


def test_a_run_in_progress_has_a_report(run: Path) -> None:
    (run / "encoder.safetensors").unlink()
    parsed, result = written(run)  # from the last checkpoint
    assert result.missing == {}
    assert "in progress" in parsed.text()
    shutil.rmtree(run / "checkpoints")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 99, "epo')  # being written just now
    parsed, result = written(run)
    assert set(result.missing) == {"neighbors", "map"}
    assert "no checkpoint yet" in result.missing["map"]
    assert "no checkpoint yet" in parsed.text()
    assert result.included["curves"]
    (run / "metrics.jsonl").write_bytes(b"")
    assert "metrics.jsonl is empty" in written(run)[1].missing["curves"]
    (run / "metrics.jsonl").write_bytes(b"rubbish\n{}\n")
    assert "not a valid record" in written(run)[1].missing["curves"]


def test_missing_images_are_reported(run: Path, tmp_path: Path) -> None:
    settings = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub(r"(?m)^data: .*$", f"data: {tmp_path / 'gone'}", settings))
    _, result = written(run)
    assert "no dataset found" in result.missing["map"]
    assert result.included["curves"]
    images = write_images(tmp_path / "images", each=3)
    assert written(run, data=str(images))[1].images == 9


def test_folders_with_few_images_have_a_report(run: Path, tmp_path: Path) -> None:
    images = tmp_path / "few"
    images.mkdir()
    (images / "broken.png").write_bytes(b"no image")
    for count in range(4):
        _, result = written(run, data=str(images), k=2)
        assert result.included["map"] is (count == 3)
        if count < 3:
            assert ("none of the 1 images" if count == 0 else f"has {count}") in result.missing["map"]
        assert result.included["neighbors"] is (count > 1)
        Image.new("RGB", (20, 20), (60 * count, 9, 9)).save(images / f"{count}.png")


def test_alerts_report_collapse_and_non_finite_steps(run: Path) -> None:
    lines = read_metrics(run)
    lines[1]["collapsed"] = lines[2]["collapsed"] = True
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "nonfinite.json").write_text(json.dumps({"step": 7, "loss": "<nan>", "gradient_norm": "inf", "ids": [1]}))
    text = written(run, embeddings=False)[0].text()
    assert f"Logged steps: 2, first at step {lines[1]['step']}, last at step {lines[2]['step']}" in text
    assert "stopped at step 7: loss <nan>" in text


def test_hostile_file_and_folder_names_are_escaped(tmp_path: Path) -> None:
    bad = '<img src=x onerror="window.canary=1">'
    images = tmp_path / "images"
    for number, label in enumerate([bad, "b\u202e&'b\n"]):
        (images / label).mkdir(parents=True)
        for n in range(8):
            pixels = np.random.default_rng(n + 10 * number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(images / label / f"{n}<script>window.canary=2;.png")
    (images / bad / "bad<script>.png").write_bytes(b"x")
    run = train(images, tmp_path / bad, epochs=1, warmup_epochs=0, batch_size=8)
    parsed, result = written(run, images=10, rows=2, k=2)
    assert result.missing == {}
    assert len(parsed.all("script")) == 3
    assert len(parsed.all("img")) == 6
    assert all((one["src"] or "").startswith("data:image/") and "onerror" not in one for one in parsed.all("img"))
    assert bad in parsed.text()
    assert "b\\u202e&'b\\x0a" in parsed.text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": 2}, "images is 2; a report takes 3 to 5,000"), ({"rows": 0}, "rows is 0"), ({"k": 21}, "k is 21"),
        ({"out": "page.png"}, "is not an HTML file"),
        ({"out": "none/page.html"}, "there is no folder none"),
    ],
)  # fmt: skip
def test_invalid_options_are_rejected(trained: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        report(trained, **options)


def test_a_folder_without_a_run_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert main(["report", str(tmp_path / "nothing")]) == 2
    output = capsys.readouterr().err
    assert "is not a run of snclr" in output
    assert "there is no run directory" in output
    assert list(tmp_path.iterdir()) == []


def test_report_is_a_function_of_the_package(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert snclr.reports.page  # type: ignore[attr-defined]
    assert snclr.report(run, embeddings=False, quiet=True).missing.keys() == {"neighbors", "map"}
    assert main(["report", str(run), "--no-embeddings", "--out", str(run / "short.html")]) == 0
    output = capsys.readouterr().out
    assert "wrote" in output
    assert "without map: images were not encoded" in output


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from snclr.cli.main import main\n"
        "try: main(['report', '--help'])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--no-embeddings" in done.stdout
