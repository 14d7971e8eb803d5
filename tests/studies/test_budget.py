"""Equal budgets, with fake worker processes whose cost is known."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from snclr.api.compare import compare
from snclr.errors import UserError
from snclr.studies.conditions import images_seen_per_step, nearest_epochs, parse_budget
from tests.studies.test_study import Workers, common, workers  # noqa: F401 (fixtures)

DEMO = {"recipe": "demo", "data": "demo"}
ROWS = "snclr,snclr:search_view=plain,dino:local_crops=4,local_size=16"


def trained(made: Workers, **wanted: object) -> dict[str, int]:
    jobs = [job for job in made.started if job["evaluation"]["kind"] == wanted.get("kind", "test")]
    return {job["label"]: job["settings"]["epochs"] for job in jobs}


def test_images_are_counted_by_the_pixels_of_all_views():
    assert images_seen_per_step({**DEMO, "batch_size": 10}) == 20
    assert images_seen_per_step({**DEMO, "batch_size": 10, "search_view": "plain"}) == 30
    local = {**DEMO, "method": "dino", "batch_size": 10, "local_crops": 4}
    assert images_seen_per_step({**local, "local_size": 16}) == 10 * (2 + 4 / 4)  # a quarter of the pixels of 32 × 32
    imagenet = {"recipe": "resnet50-imagenet", "method": "swav", "local_crops": 6, "batch_size": 7}
    assert images_seen_per_step(imagenet) == pytest.approx(7 * (2 + 6 * (96 / 224) ** 2))


def test_epochs_are_the_nearest_whole_number():
    assert nearest_epochs(100, per_step=1, steps_per_epoch=30) == 3
    assert nearest_epochs(110, per_step=1, steps_per_epoch=30) == 4
    assert nearest_epochs(1, per_step=1, steps_per_epoch=30) == 1
    assert parse_budget(None) == parse_budget("steps")


def test_equal_steps_are_equal_epochs(workers, common):  # noqa: F811
    compare(methods=ROWS, seeds=1, budget="steps", **{**common, "epochs": 6})
    assert set(trained(workers).values()) == {6}
    before = len(workers.started)
    compare(methods=ROWS, seeds=1, **{**common, "epochs": 6})
    assert len(workers.started) == before  # the default is the same study
    compare(methods=ROWS, seeds=1, budget="steps=12", **common)  # 3 steps per epoch
    assert set(trained(workers).values()) == {4}


def test_equal_images_give_fewer_epochs_to_methods_with_more_views(workers, common):  # noqa: F811
    result = compare(methods=ROWS, seeds=2, budget="images", **{**common, "epochs": 6})
    assert list(trained(workers).values()) == [6, 4, 4]  # 2, 3 and 2 + 4 × (16/32)² views
    [line] = [line for line in result.table["protocol"] if line.startswith("equal budget")]
    assert "images seen" in line
    assert line.endswith("snclr 6, snclr:search_view=plain 4, dino:local_crops=4,local_size=16 4")
    compare(methods=ROWS, seeds=1, budget="images=960", **common)  # 10 epochs of 3 steps of 16 images, twice
    assert list(trained(workers).values()) == [10, 7, 7]


@pytest.mark.parametrize("budget", ["images", "seconds", "steps=12"])
def test_a_study_of_costs_has_no_budget(budget, workers, common):  # noqa: F811
    with pytest.raises(UserError, match=f"--budget {budget} is for trained rows"):
        compare(study="table-6-cost", seeds=1, budget=budget, neighbors=3, **{**common, "encoder": "resnet10-tiny"})
    assert not workers.started


class Timed(Workers):
    """Workers whose calibration reports given CPU seconds per step."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float | None] = {"neither": 0.1, "both": 0.25}

    def __call__(self, job, log):
        done = super().__call__(job, log)
        described = json.loads(job.read_text())
        if described["evaluation"]["kind"] == "cost":
            path = Path(described["record"])
            record = json.loads(path.read_text())
            per_step = self.seconds[described["settings"]["sides"]]
            if per_step is None:
                path.unlink()
                log.write_text("MemoryError\n")
                done.returncode = 1
                return done
            record["cost"] |= {"cpu_seconds_per_step": per_step, "seconds_with_views": 99.0}
            record["where"] = {**record["where"], "accelerator": "cpu"}
            path.write_text(json.dumps(record))
        return done


@pytest.fixture
def timed(workers, monkeypatch) -> Timed:  # noqa: F811
    from snclr.studies import runner

    made = Timed()
    monkeypatch.setattr(runner, "start_worker", made)
    return made


SIDES = "snclr:sides=neither,snclr"


def test_equal_seconds_follow_from_the_calibration_which_is_kept(timed, common):  # noqa: F811
    result = compare(methods=SIDES, seeds=2, budget="seconds", **{**common, "epochs": 10})
    assert trained(timed, kind="cost") == {"snclr:sides=neither": 10, "snclr": 10}
    assert trained(timed) == {"snclr:sides=neither": 10, "snclr": 4}
    study = json.loads((common["out"] / "results/studies/compare.json").read_text())
    assert study["budget"]["epochs"] == {"snclr:sides=neither": 10, "snclr": 4}
    assert study["budget"]["calibration"]["snclr"]["seconds_per_step"] == 0.25
    assert any("in seconds" in line for line in result.table["protocol"])

    # A machine that is slower by now does not change the study: it is continued with the recorded calibration.
    timed.seconds = {"neither": 7.0, "both": 7.0}
    started = len(timed.started)
    compare(methods=SIDES, seeds=3, budget="seconds", **{**common, "epochs": 10})
    assert [job["settings"]["epochs"] for job in timed.started[started:]] == [10, 4]
    assert {job["evaluation"]["kind"] for job in timed.started[started:]} == {"test"}


class Costed(Workers):
    """Workers whose second row was killed once, so that its CPU seconds are not known."""

    def __call__(self, job, log):
        done = super().__call__(job, log)
        path = Path(json.loads(job.read_text())["record"])
        record = json.loads(path.read_text())
        known = record["settings"]["sides"] == "neither"
        record["cost"] |= {"steps": 6, "images": 192, "cpu_seconds": 7.0 if known else None}
        path.write_text(json.dumps(record))
        return done


@pytest.mark.parametrize("budget", ["steps", "images"])
def test_steps_images_and_seconds_of_every_row_are_printed(budget, workers, common, monkeypatch):  # noqa: F811
    from snclr.studies import runner

    monkeypatch.setattr(runner, "start_worker", Costed())
    result = compare(methods=SIDES, seeds=1, budget=budget, **common)
    text = Path(result.files["markdown"]).read_text()
    assert "| steps | images seen | seconds | CPU seconds |" in text
    first, second = (re.search(rf"^\| {label} \| .*", text, re.MULTILINE)[0] for label in SIDES.split(","))
    assert "| 6 | 192 | 10 | 7 |" in first
    assert "| 6 | 192 | 10 | – |" in second


def test_an_amount_of_seconds_is_given_to_every_row(timed, common):  # noqa: F811
    compare(methods=SIDES, seeds=1, budget="seconds=6", **common)
    assert trained(timed) == {"snclr:sides=neither": 20, "snclr": 8}


def test_tuning_trials_have_the_budget_too(timed, common):  # noqa: F811
    compare(methods=SIDES, seeds=1, budget="seconds=6", tune=["lr=0.02,0.03"], **common)
    assert trained(timed, kind="validation") == trained(timed) == {"snclr:sides=neither": 20, "snclr": 8}


def test_a_row_that_cannot_be_measured_is_reported(timed, common):  # noqa: F811
    timed.seconds = {"neither": 0.1, "both": None}
    result = compare(methods=SIDES, seeds=1, budget="seconds", **common)
    assert result.exit_code == 1
    assert result.failed["snclr"] == "its budget could not be measured"
    assert list(trained(timed)) == ["snclr:sides=neither"]


def test_an_untrained_row_has_no_budget(timed, common):  # noqa: F811
    compare(methods="random," + SIDES, seeds=1, budget="seconds", **{**common, "epochs": 10})
    assert list(trained(timed, kind="cost")) == ["snclr:sides=neither", "snclr"]
    assert trained(timed)["snclr"] == 4


def test_a_dry_run_in_seconds_counts_the_epochs_as_given_until_it_is_calibrated(timed, common):  # noqa: F811
    given = {"methods": SIDES, "seeds": 2, "budget": "seconds", **common, "epochs": 10}
    estimate = compare(**given, dry_run=True)
    assert estimate.pending == len(estimate.runs) == 4
    assert not common["out"].exists()
    compare(**{**given, "seeds": 1})
    after = compare(**given, dry_run=True)
    assert after.pending == 2
    assert [run["finished"] for run in after.runs] == [True, True, False, False]
