from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import snclr
from snclr.api.evaluate import knn
from snclr.api.report import report
from snclr.api.retrieval import neighbors
from snclr.cli.main import main
from snclr.errors import UserError
from snclr.evaluation.results import append_result
from snclr.reports.build import ReportResult
from snclr.train.metrics import read_metrics
from snclr.train.sessions import read_sessions
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
    for name in ("loss", "lr", "spread", "effective_rank", "neighbor_purity", "queue_knn", "neighbor_age"):
        assert data[name]["lines"][0]["value"] == [
            pytest.approx(line[name], rel=1e-5) for line in lines if name in line
        ]
    assert "red/broken.png" in parsed.text()
    assert "91.20%" in parsed.text()
    shares = np.array([16, 16, 17]) / 49  # red has the unreadable file
    assert f"last logged step; chance {np.square(shares).sum():.1%}" in parsed.text()
    assert {"blue", "green", "red"} == set(parsed.data("map-data")["classes"])
    assert sorted(parsed.data("map-data")["names"])[0] == "blue/blue_0.png"
    assert len(parsed.all("img")) == 6 * (1 + 5)


def test_sessions_are_recorded_and_shown(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (session,) = read_sessions(run)
    assert session["seconds"] > 0
    assert session["command"] is None  # called from Python
    text = written(run, embeddings=False)[0].text()
    for expected in ("Python API", session["device"], f"torch {session['versions']['torch']}"):
        assert expected in text
    monkeypatch.setattr(sys, "argv", ["/usr/bin/snclr", "pretrain", "--out", str(run), "--resume"])
    assert main(["pretrain", "--out", str(run), "--resume", "--json"]) == 0
    assert read_sessions(run)[1]["command"] == f"snclr pretrain --out {run} --resume"
    (run / "sessions.jsonl").unlink()
    assert "there is no sessions.jsonl" in written(run, embeddings=False)[0].text()


def test_accuracy_by_class_and_confusion_matrix(run: Path, tmp_path: Path) -> None:
    result = knn(run, k=7, quiet=True)
    (tmp_path / "names.txt").write_text("ocean\nforest\nsunset\n")
    parsed, _ = written(run, class_names=tmp_path / "names.txt")
    words = parsed.text().split()
    assert "kNN with k = 7 on 8 test images" in parsed.text()  # a fifth of each class, without the broken image
    titles = [cell["title"] for cell in parsed.all("td") if cell.get("title")]
    counts = np.array([int(title.split()[0]) for title in titles]).reshape(3, 3)  # type: ignore[union-attr]
    assert counts.sum(axis=1).tolist() == [3, 3, 2]
    assert np.trace(counts) / 8 == pytest.approx(result.top1)
    assert {"ocean", "forest", "sunset"} <= set(words)
    assert set(parsed.data("map-data")["classes"]) == {"ocean", "forest", "sunset"}
    assert not {"blue", "green"} & set(words)
    (tmp_path / "names.txt").write_text('["a", "b"]')
    with pytest.raises(UserError, match=r"has 2 names, but .* has 3 classes"):
        report(run, class_names=tmp_path / "names.txt")


def test_a_knn_result_that_cannot_be_repeated_has_no_class_table(run: Path) -> None:
    assert 'id="classes"' not in Path(report(run, quiet=True).report).read_text()
    record = knn(run, k=7, quiet=True)
    append_result(run, "knn", {"top1": record.top1 / 2}, record.protocol, settings=record.settings)
    parsed, _ = written(run)
    assert f"kNN now gives {record.top1:.2%} instead of the recorded {record.top1 / 2:.2%}" in parsed.text()
    append_result(run, "knn", {"top1": 0.5}, "weighted vote")
    assert "does not record its settings" in written(run)[0].text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "a name for every class"),
        ("a\n\nb", "a name for every class"),
        ("[1]", "every class"),
        ("[", "not a JSON list"),
    ],
)
def test_invalid_class_names_are_rejected(tmp_path: Path, trained: Path, content: str, message: str) -> None:
    (tmp_path / "names").write_text(content)
    with pytest.raises(UserError, match=message):
        report(trained, class_names=tmp_path / "names")
    with pytest.raises(UserError, match="cannot read the class names"):
        report(trained, class_names=tmp_path / "gone")


def test_the_report_is_deterministic(run: Path, tmp_path: Path) -> None:
    pages = [report(run, out=tmp_path / f"{n}.html", cache=False, quiet=True).report for n in range(2)]
    first, second = (re.sub(r"Written [^<]* by", "", Path(one).read_text()) for one in pages)
    assert first == second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.html", "1.html", "run"]


def test_the_gallery_is_that_of_snclr_neighbors(run: Path) -> None:
    parsed, _ = written(run, cache=False)
    table = neighbors(run, rows=6, k=5, seed=0, quiet=True, cache=False)
    keys = [image.key for row in table.rows for image in (row, *row.neighbors)]
    assert [(one["alt"] or "").partition(",")[0] for one in parsed.all("img")] == keys


def test_w_is_that_of_training(trained: Path, run: Path) -> None:
    """The run has K = 5 and gamma 1: w sums to 1 over 5 neighbors, also if only 3 of them are shown."""

    def shown(**options: Any) -> np.ndarray:
        parsed, _ = written(run, **options)
        return np.array(re.findall(r"w\u202f=\u202f([\d.]+)", parsed.text()), float).reshape(6, -1)

    assert shown(k=5).sum(axis=1) == pytest.approx(np.ones(6), abs=0.003)
    three = shown(k=3)
    assert ((three > 0.1) & (three < 0.35)).all()
    settings = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub(r"(?m)^gamma: .*$", "gamma: 0.5", settings))
    assert shown(k=5).sum(axis=1) == pytest.approx(2 * np.ones(6), abs=0.003)
    text = written(run)[0].text()
    assert "softmax over the 5 nearest neighbors with temperature 1, divided by gamma = 0.5" in text


def test_a_method_without_w_shows_cosines_only(trained: Path, tmp_path: Path) -> None:
    images = trained.parent / "images"
    run = train(images, tmp_path / "byol", method="byol", neighbors=None, queue_length=None)
    parsed, _ = written(run)
    assert "cosine 0." in parsed.text()
    assert "positiveness" not in parsed.text()
    assert "w\u202f=" not in parsed.text()


def test_the_image_sample_is_seeded(run: Path) -> None:
    first, result = written(run, images=20)
    again, _ = written(run, images=20)
    other, _ = written(run, images=20, seed=1)
    names = [one.data("map-data")["names"] for one in (first, again, other)]
    assert result.images == len(names[0]) >= 19  # one of them may be the broken one
    assert names[0] == names[1] != names[2]
    assert all(re.fullmatch(r"(blue|green|red)/\1_\d+\.png", one) for one in names[0])


def test_a_run_without_an_encoder_has_a_report(run: Path) -> None:
    (run / "encoder.safetensors").unlink()
    parsed, result = written(run)  # from the last checkpoint
    assert result.missing == {}
    assert "stopped at step" in parsed.text()
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
    assert "has no valid record" in written(run)[1].missing["curves"]


def test_invalid_lines_of_the_metrics_are_skipped_and_counted(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    before = written(run, embeddings=False)[0]
    (run / "metrics.jsonl").write_bytes(b"".join([lines[0], b"\x00\xffbroken\n", *lines[1:], b'{"step": 99, "ep']))
    parsed, result = written(run, embeddings=False)
    assert result.included["curves"]
    assert parsed.data("curves-data") == before.data("curves-data")
    assert "1 line of metrics.jsonl is not a valid record and was skipped." in parsed.text()
    assert "valid record" not in before.text()


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
            assert ("no image of" if count == 0 else f"has {count}") in result.missing["map"]
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


def test_runs_are_overlaid(trained: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Path(shutil.copytree(run, run.parent / "<b>other"))
    settings = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(re.sub(r"(?m)^seed: .*$", "seed: 7", settings))
    sets = {"data": "train a, test b", "n": 100}
    append_result(run, "knn", {"top1": 0.5, "top5": None}, "kNN", k=3, **sets)
    append_result(other, "knn", {"top1": 0.6, "top5": None}, "kNN", k=3, **sets)
    append_result(other, "linear-cached", {"top1": 0.9, "top5": None}, "linear", **sets)
    assert main(["report", str(run), str(other), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["report"] == str(run / "report-runs.html")
    assert not (run / "report.html").exists()
    parsed = ParsedPage(Path(result["report"]).read_text())
    words = " ".join(parsed.text().split()).replace("\u202f", " ")
    assert "train a, test b n = 100 test images" in words
    assert "of few-shot results over the draws" in words
    assert "kNN50.0% ± 5.0k = 3 60.0% ± 4.9k = 3 linear probe–90.0% ± 3.0" in words
    assert "seed07" in words  # the only setting that differs
    assert "batch_size" not in words
    assert "<b>other" in words
    loss = [line["loss"] for line in read_metrics(run)]
    lines = parsed.data("curves-data")["loss"]["lines"]
    assert [line["value"] for line in lines] == [[pytest.approx(value, rel=1e-5) for value in loss]] * 2
    assert main(["report", str(run), str(other), str(trained), "--out", str(run / "three.html")]) == 0
    assert "Report of 3 runs" in (run / "three.html").read_text()
    for arguments in ([run, run], [run, other, "--data", "demo"]):
        assert main(["report", *map(str, arguments)]) == 2
    assert "given twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": 2}, "images must be at least 3 and at most 5,000, not 2"), ({"rows": 0}, "rows must be"),
        ({"k": 21}, "k must be at least 1 and at most 20, not 21"),
        ({"out": "page.png"}, "ends in '.png'; use .html"),
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
