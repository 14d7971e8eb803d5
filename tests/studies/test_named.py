"""Named studies: rows and results of the paper's tables, on little data with fake worker processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from snclr.api.compare import compare
from snclr.api.lists import list_studies
from snclr.data.info import DatasetInfo
from snclr.errors import UserError
from snclr.studies.conditions import count_trials, parse_tune, row_trials
from snclr.studies.paper import is_small, named_studies, study_measures, study_rows, study_settings
from snclr.studies.runs import Evaluation, make_run
from tests.helpers import tiny_coco
from tests.studies.test_study import common, workers  # noqa: F401 (fixtures)

IMAGENET = DatasetInfo("imagenet", 1_281_167, "abc", 1000, {"neighbor_purity": 0.001})
STUDIES = named_studies()
TABLES = {name: study for name, study in STUDIES.items() if any(system.reported for system in study.systems)}
FEW_LABELS = ("finetune1", "finetune10", "finetune1_top5", "finetune10_top5")
DETECTION = ("AP_bb", "AP50_bb", "AP75_bb", "AP_mk", "AP50_mk", "AP75_mk")


@pytest.mark.parametrize("name", STUDIES)
def test_every_row_of_every_study_can_be_resolved(name):
    study = STUDIES[name]
    for given, data in (
        ({}, IMAGENET),
        ({"data": "demo", "recipe": "demo"}, DatasetInfo("demo", 6000, "d", 5, {"neighbor_purity": 0.2})),
    ):
        settings = study_settings(study, given)
        rows, _ = study_rows(study, settings, data)
        labels = [row.label for row in rows]
        assert len(set(labels)) == len(labels)
        for row in rows:
            run = make_run(row, 0, settings, data="abc", evaluation=Evaluation())
            resolved = run.settings
            trials = row_trials(row, parse_tune(study.tune), resolved, 10**6)
            assert len(trials) == (0 if row.untrained else count_trials(parse_tune(study.tune)))


def test_the_reported_results_are_those_of_the_tables():
    by_label = {table.source: {s.label: s for s in table.systems} for table in TABLES.values()}
    assert by_label["Table 1 (a)"]["SNCLR"].reported[800]["linear"] == 75.3
    assert by_label["Table 1 (a)"]["Barlow Twins"].reported == {400: {"linear": 72.5}, 800: {"linear": 73.2}}
    assert by_label["Table 1 (b)"]["MoCo v3*"].reported[300]["linear"] == 72.5
    assert by_label["Table 2 (a)"]["BYOL"].reported[800] == dict(zip(FEW_LABELS, (53.2, 68.8, 78.4, 89.0), strict=True))
    assert by_label["Table 3"]["DetCo"].reported[200]["AP_mk"] == 34.4
    # Every row of Table 3 has six numbers; box AP50 is above box AP75, and that above mask AP75.
    for system in by_label["Table 3"].values():
        (reported,) = system.reported.values()
        assert tuple(reported) == DETECTION
        assert reported["AP50_bb"] > reported["AP75_bb"] > reported["AP75_mk"]


def test_the_sixteen_systems_of_the_paper_are_in_the_small_study():
    in_tables = {system.method for table in TABLES.values() for system in table.systems}
    in_small = {system.method for system in STUDIES["all-methods-small"].systems}
    assert in_tables <= in_small
    learned = {system.label for system in STUDIES["all-methods-small"].systems} - {
        "supervised", "random", "random (ViT)"
    }  # fmt: skip
    assert len(learned) == 16


def test_on_imagenet_rows_have_the_papers_epochs_and_protocol():
    study = STUDIES["table-2-resnet50"]
    settings = study_settings(study, {"data": "imagenet"})
    assert settings["recipe"] == "resnet50-imagenet"
    rows, _ = study_rows(study, settings, IMAGENET)
    assert {row.label: row.settings.get("epochs") for row in rows} == {
        "SNCLR": 400, "Supervised": None, "SimCLR": 800, "NNCLR*": 400, "MoCo v3*": 400, "BYOL": 800,
    }  # fmt: skip
    table = STUDIES["table-1-resnet50"]
    settings = study_settings(table, {"data": "imagenet", "epochs": 100})
    reported = {row.label: row.paper for row in study_rows(table, settings, IMAGENET)[0]}
    assert reported["MoCo v3"] == {"linear": 68.1}
    assert reported["InfoMin Aug"] == {}
    rows, notes = study_rows(table, {**settings, "epochs": 7}, IMAGENET)
    assert not any(row.paper for row in rows)
    assert notes == ["the paper has no results of these rows after 7 epochs"]
    assert study_measures(table, settings) == ("knn", "linear-paper")
    assert not is_small(settings)


def test_a_table_at_full_scale_on_other_data_is_not_titled_imagenet(common, workers):  # noqa: F811
    given = {**common, "recipe": "resnet50-imagenet", "precision": "32", "encoder": "resnet10-tiny", "image_size": 32}
    result = compare(study="table-1-resnet50", methods="snclr", seeds=1, neighbors=3, queue_length=20, **given)
    name = Path(common["data"]).name
    assert result.table["title"] == f"{name}: rows of Table 1 (a) of the paper, 1 row, 1 seed"
    assert workers.started[0]["evaluation"]["measures"] == ["knn", "linear-paper"]


def test_with_a_budget_the_epochs_of_rows_do_not_differ():
    study = STUDIES["table-3-detection"]
    settings = study_settings(study, {"data": "demo", "recipe": "demo", "epochs": 8})
    own = {row.label: row.settings.get("epochs") for row in study_rows(study, settings, IMAGENET)[0]}
    assert own["SNCLR at 200 epochs"] == 8
    assert own["SNCLR at 800 epochs"] == 32
    assert own["Supervised"] == 4
    equal = study_rows(study, settings, IMAGENET, own_epochs=False)[0]
    assert not any("epochs" in row.settings for row in equal)


def test_a_table_runs_on_little_data_with_the_papers_results_beside(workers, common):  # noqa: F811
    result = compare(study="table-1-resnet50", seeds=1, **common)
    rows = {row["label"]: row for row in result.table["rows"]}
    assert rows["SNCLR"]["paper"] == {"linear": 72.4}
    assert rows["InfoMin Aug"]["paper"] == {"linear": 70.1}
    views = {job["label"]: job["settings"]["views"] for job in workers.started}
    assert views["InfoMin Aug"] == "infomin"
    assert views["SNCLR"] == "cifar"
    text = Path(result.files["markdown"]).read_text()
    assert re.search(r"\| row \| kNN top-1 \| linear top-1 \| paper \|", text)
    assert re.search(r"\| SNCLR \| [\d.]+ \| [\d.]+ \| 72.4 \|", text)
    assert result.files["markdown"].endswith("table-1-resnet50.md")
    assert "Table 1 (a)" in " ".join(result.table["notes"])
    assert "--study table-1-resnet50" in result.table["command"]


def test_rows_can_be_selected_by_method_or_label(workers, common):  # noqa: F811
    compare(study="table-1-resnet50", methods="snclr,MoCo v3", seeds=1, **common)
    assert [job["label"] for job in workers.started] == ["SNCLR", "MoCo v3"]
    assert not [system.label for study in STUDIES.values() for system in study.systems if "," in system.label]
    with pytest.raises(UserError, match="the study has no such row"):
        compare(study="table-1-resnet50", methods="dino", seeds=1, **common)


def test_the_tables_of_ablations_have_the_papers_results(workers, common):  # noqa: F811
    result = compare(study="table-5-queue", seeds=1, neighbors=3, **{**common, "encoder": "resnet10-tiny"})
    reported = [row.get("paper", {}).get("linear") for row in result.table["rows"]]
    lengths = [job["settings"]["queue_length"] for job in workers.started][1:]
    assert reported == [71.17, 72.25, 72.67, 72.43, 73.02, 73.38]
    assert lengths == sorted(lengths)
    assert len(lengths) == 5
    cost = compare(study="table-6-cost", seeds=1, neighbors=3, **{**common, "encoder": "resnet10-tiny"})
    assert [row.get("paper", {}).get("seconds_per_step") for row in cost.table["rows"]] == [
        None, 2.687, 2.717, 2.755, 2.824, 2.883,
    ]  # fmt: skip
    assert "| 131.07 | 2.883 |" in Path(cost.files["markdown"]).read_text()


def test_with_fewer_rows_than_the_paper_the_row_without_neighbors_keeps_its_result():
    study = STUDIES["table-5-queue"]
    settings = study_settings(study, {"data": "demo", "recipe": "demo", "neighbors": 10})
    rows, _ = study_rows(study, settings, DatasetInfo("tiny", 30, "d", 5, {"neighbor_purity": 0.2}))
    assert [(row.settings.get("queue_length"), row.paper["linear"]) for row in rows] == [
        (None, 71.17), (10, 72.43), (15, 73.02), (30, 73.38),
    ]  # fmt: skip


def test_a_study_of_detection_needs_its_data(workers, common, tmp_path):  # noqa: F811
    with pytest.raises(UserError, match="give the COCO data with --coco"):
        compare(study="table-3-detection", seeds=1, **common)
    coco = tiny_coco.write(tmp_path / "coco")
    result = compare(study="table-3-detection", methods="snclr,random", seeds=1, coco=str(coco), **common)
    assert "--coco coco " in result.table["command"]
    assert [job["label"] for job in workers.started] == ["SNCLR at 200 epochs", "SNCLR at 800 epochs", "Rand Init"]
    evaluation = workers.started[0]["evaluation"]
    assert evaluation["coco"] == str(coco)
    assert evaluation["detect_recipe"] == "cpu"
    assert evaluation["measures"] == ["knn", "detect"]
    before = len(workers.started)
    with pytest.raises(UserError, match="vit_tiny is not a ResNet"):
        compare(study="table-3-detection", coco=str(coco), **{**common, "encoder": "vit_tiny", "stem": "auto"})
    assert len(workers.started) == before


def test_supervised_and_untrained_rows_take_part_in_a_tuned_study(workers, common, images):  # noqa: F811
    result = compare(methods="snclr,supervised,random", tune=["lr=x1,x2"], seeds=1, **common)
    trials = [job for job in workers.started if job["evaluation"]["kind"] == "validation"]
    assert [job["label"] for job in trials] == ["snclr", "snclr", "supervised", "supervised"]
    assert {job["given"]["data"] for job in trials} == {f"{images}#fit"}
    finals = [job for job in workers.started if job["evaluation"]["kind"] == "test"]
    assert {job["given"]["data"] for job in finals} == {str(images)}
    rows = {row["label"]: row for row in result.table["rows"]}
    assert [trial["settings"]["lr"] for trial in rows["supervised"]["trials"]] == [0.004, 0.008]
    assert rows["supervised"]["tuned"] == {"lr": 0.008}  # the fake accuracy is highest at 0.03
    assert "trials" not in rows["random"]
    text = Path(result.files["markdown"]).read_text()
    assert re.search(r"\| supervised \| lr=0.004: [\d.]+ \| lr=0.008: [\d.]+\* \|", text)
    with pytest.raises(UserError, match="labels of the validation images"):
        compare(methods="snclr,supervised", tune=["lr=1,2"], eval_data=str(images), seeds=1, **common)


def test_a_failed_trial_is_stated_and_the_study_is_continued(workers, common):  # noqa: F811
    workers.failing = lambda s: s["lr"] == 0.05
    given = {**common, "methods": "snclr", "tune": ["lr=0.03,0.05"], "seeds": 1}
    result = compare(**given)
    assert result.table["rows"][0]["trials"][1]["knn"] is None
    assert any("not all tuning trials succeeded: snclr" in note for note in result.table["notes"])
    workers.failing = lambda s: False
    before = len(workers.started)
    again = compare(**given)
    assert [job["settings"]["lr"] for job in workers.started[before:]] == [0.05]  # that trial alone
    assert not any("not all tuning" in note for note in again.table["notes"])
    kept = json.loads(Path(again.files["json"]).read_text())
    assert len(kept["rows"][0]["trials"]) == 2


def test_the_tuning_of_a_study_can_be_left_out(workers, common):  # noqa: F811
    given = {"study": "all-methods-small", "methods": "simclr,random", "seeds": 1, **common}
    compare(**given, tune=["none"])
    assert [job["label"] for job in workers.started] == ["simclr", "random", "random (ViT)"]
    compare(**given)
    kinds = [(job["label"], job["evaluation"]["kind"]) for job in workers.started[3:]]
    assert kinds[:2] == [("simclr", "validation")] * 2
    assert {label for label, _ in kinds} == {"simclr"}  # the untrained rows are there


def test_untrained_rows_need_no_other_rows(workers, common):  # noqa: F811
    result = compare(methods="random", seeds=2, **common)
    assert result.exit_code == 0
    assert [job["given"]["seed"] for job in workers.started] == [0, 1]
    assert workers.started[0]["folder"].split("/")[-1].startswith("random-seed0-")


def test_every_study_is_listed():
    assert list(list_studies()) == list(STUDIES)
    for name in STUDIES:
        assert list_studies(name)["command"].startswith(f"snclr compare --study {name} ")
