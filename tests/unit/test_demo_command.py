"""`snclr demo` replaces an earlier demo and nothing else."""

import pytest
import yaml

from snclr.commands.demo import demo
from snclr.errors import UserError
from snclr.train.pretrain import PretrainResult
from snclr.train.run_folder import RunFolder


def write_run(folder, **config):
    """What a run leaves, as far as `demo` looks at it."""
    with RunFolder.create(folder) as run:
        run.metrics.write_text("{}\n")
        if config:
            run.config.write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture
def asked(monkeypatch):
    """What the training was asked for; it stops at once."""
    found = []

    def stopped(**settings):
        found.append(settings)
        return PretrainResult(settings["out"], 0, 1, 0, 130)

    monkeypatch.setattr("snclr.train.pretrain.pretrain", stopped)
    return found


@pytest.mark.parametrize(
    "config",
    [
        {"recipe": "photos", "data": "my-photos/"},
        {"recipe": "demo", "data": "my-photos/"},
        {"recipe": "photos", "data": "demo"},
    ],
)
def test_another_run_is_refused_and_stays(tmp_path, config):
    run = write_run(tmp_path / "run", **config)
    before = sorted(path.name for path in run.iterdir())
    with pytest.raises(UserError, match=r"run holds a run that is no demo.*--out"):
        demo(out=run, quiet=True)
    assert sorted(path.name for path in run.iterdir()) == before


@pytest.mark.parametrize("text", ["[", None])
def test_a_run_whose_settings_are_damaged_or_gone_is_no_demo(tmp_path, text):
    run = write_run(tmp_path / "run")
    if text is not None:
        (run / "config.yaml").write_text(text)
    with pytest.raises(UserError):
        demo(out=run, quiet=True)
    assert (run / "metrics.jsonl").exists()


def test_an_earlier_demo_is_replaced(tmp_path, asked):
    run = write_run(tmp_path / "run", recipe="demo", data="demo", seed=3)
    assert demo(out=run, quiet=True)["exit_code"] == 130
    assert demo(out=tmp_path / "new", quiet=True)["exit_code"] == 130
    (tmp_path / "empty").mkdir()
    demo(out=tmp_path / "empty", quiet=True)
    RunFolder.create(tmp_path / "killed").close()  # a demo killed before it wrote anything
    demo(out=tmp_path / "killed", quiet=True)
    assert [settings["overwrite"] for settings in asked] == [True, False, False, False]


def test_a_demo_that_must_stay_is_refused(tmp_path):
    run = write_run(tmp_path / "run", recipe="demo", data="demo")
    with pytest.raises(UserError, match="already holds a run"):
        demo(out=run, overwrite=False, quiet=True)
