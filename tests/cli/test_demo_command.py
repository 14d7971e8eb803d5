"""`snclr demo` replaces an earlier demo and no other run, and prints accuracies with their context."""

import re
import signal

import numpy as np
import pytest
import yaml

from snclr.api.demo import demo
from snclr.checkpoint.run_dir import RunDir
from snclr.cli.main import main
from snclr.data.datasets.builtin import open_demo
from snclr.data.splits import take
from snclr.errors import UserError
from snclr.evaluation.results import read_results
from snclr.runtime.stop import StopRequested
from snclr.train.health import PURITY_OF_CENTER_CROPS


def write_run(folder, **config):
    """Write the files of a run that `demo` reads."""
    with RunDir.create(folder) as run:
        run.metrics.write_text("{}\n")
        if config:
            run.config.write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture
def trained(monkeypatch):
    """Collect the settings of each training, which stops at once."""
    calls = []

    def stop(**settings):
        calls.append(settings)
        raise StopRequested(signal.SIGINT, 0, 1)

    monkeypatch.setattr("snclr.pretrain", stop)
    return calls


@pytest.mark.parametrize(
    "config",
    [
        {"recipe": "photos", "data": "my-photos/"},
        {"recipe": "demo", "data": "my-photos/"},
        {"recipe": "photos", "data": "demo"},
    ],
)
def test_another_run_is_refused_and_kept(tmp_path, config):
    run = write_run(tmp_path / "run", **config)
    before = sorted(path.name for path in run.iterdir())
    with pytest.raises(UserError, match=r"run holds a run that is not a demo.*--out"):
        demo(out=run, quiet=True)
    assert sorted(path.name for path in run.iterdir()) == before


@pytest.mark.parametrize("text", ["[", None])
def test_a_run_with_damaged_or_missing_settings_is_not_a_demo(tmp_path, text):
    run = write_run(tmp_path / "run")
    if text is not None:
        (run / "config.yaml").write_text(text)
    with pytest.raises(UserError):
        demo(out=run, quiet=True)
    assert (run / "metrics.jsonl").exists()


def test_an_earlier_demo_is_replaced(tmp_path, trained):
    write_run(tmp_path / "earlier", recipe="demo", data="demo", seed=3)
    (tmp_path / "empty").mkdir()
    RunDir.create(tmp_path / "killed").close()  # a demo killed before it wrote anything
    for name in ("earlier", "new", "empty", "killed"):
        with pytest.raises(StopRequested):
            demo(out=tmp_path / name, quiet=True)
    assert [settings["overwrite"] for settings in trained] == [True, False, False, False]


def test_without_overwrite_an_earlier_demo_is_refused(tmp_path):
    run = write_run(tmp_path / "run", recipe="demo", data="demo")
    with pytest.raises(UserError, match="already contains a run"):
        demo(out=run, overwrite=False, quiet=True)


def test_the_table_has_standard_errors_chance_and_baselines(tmp_path, monkeypatch, capsys):
    sizes = {"train": 160, "test": 50}

    def few(split):
        dataset = open_demo(split)
        return take(
            dataset, np.concatenate([np.flatnonzero(dataset.labels == n)[: sizes[split] // 5] for n in range(5)])
        )

    monkeypatch.setattr("snclr.data.datasets.builtin.open_demo", few)
    assert main(["demo", "--out", str(tmp_path / "run"), "--epochs", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("top-1 accuracy ± standard error on 50 test images; chance 20.0% (1/5)")
    records = {record["kind"]: record for record in read_results(tmp_path / "run")}
    knn, linear = records["knn"], records["linear-cached"]
    rows = {"trained (SNCLR)": (knn["numbers"], linear["numbers"])}
    rows |= {name: (knn["baselines"][name], linear["baselines"][name]) for name in ("untrained encoder", "raw pixels")}
    for line, (name, scores) in zip(lines[start + 2 : start + 5], rows.items(), strict=True):
        cells = re.split(r"\s{2,}", line)
        assert cells[0] == name
        for cell, score in zip(cells[1:], scores, strict=True):
            error = (score["top1"] * (1 - score["top1"]) / 50) ** 0.5
            assert cell == f"{score['top1']:.1%} ± {error:.1%}"
    purity = next(number for number, line in enumerate(lines) if line.startswith("neighbor purity, 1st to 5th"))
    assert lines[purity + 1] == f"  {PURITY_OF_CENTER_CROPS}; chance 20.0%"
