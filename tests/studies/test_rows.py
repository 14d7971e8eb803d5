from __future__ import annotations

import pytest

from snclr.data.info import DatasetInfo
from snclr.errors import UserError
from snclr.studies.options import parse_seeds
from snclr.studies.paper import TABLES, ablation_rows, queue_lengths
from snclr.studies.runs import Evaluation, Row, make_run, parse_methods
from snclr.train.config import resolve

COMMON = {"recipe": "demo", "data": "demo"}


def run(
    entry: Row | None = None, seed: int = 0, data: str = "abc", evaluation: Evaluation | None = None, **common: object
):
    entry = entry or Row("snclr", {"method": "snclr"})
    return make_run(entry, seed, {**COMMON, **common}, data=data, evaluation=evaluation or Evaluation())


def test_rows_with_and_without_settings():
    entries = parse_methods("snclr, snclr:neighbors=10,gamma=max,final-bn=true,lr=1e-3,nnclr")
    assert [entry.label for entry in entries] == [
        "snclr",
        "snclr:neighbors=10,gamma=max,final-bn=true,lr=1e-3",
        "nnclr",
    ]
    assert entries[1].settings == {"method": "snclr", "neighbors": 10, "gamma": "max", "final_bn": True, "lr": 0.001}


def test_methods_may_be_a_list():
    assert parse_methods(["snclr:neighbors=10,gamma=2", "byol"]) == parse_methods("snclr:neighbors=10,gamma=2,byol")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("snclr,snclr", "twice"),
        ("neighbors=10,snclr", "Write METHOD:NAME=VALUE"),
        ("snclr,neighbors=10", "Write METHOD:NAME=VALUE"),
        ("snclr:neighbors", "Write METHOD:NAME=VALUE"),
        ("snclr:neigbors=10", "did you mean 'neighbors'"),
        ("snclr:neighbors=many", "must be a whole number"),
        ("snclr:epochs=10", "same for all rows"),
        ("snclr:encoder=resnet50", "same for all rows"),
        ("snclr:seed=3", "same for all rows"),
        ("nosuch", "there is no method .nosuch."),
    ],
)
def test_invalid_rows_are_rejected(text, message):
    with pytest.raises(UserError, match=message):
        parse_methods(text)


@pytest.mark.parametrize("seeds", ["0", "", "a", "1,1", "-1,2", [], "2,x"])
def test_invalid_seeds_are_rejected(seeds):
    with pytest.raises(UserError, match="--seeds"):
        parse_seeds(seeds)


def test_the_key_depends_on_training_and_evaluation():
    keys = [
        run(),
        run(seed=1),
        run(data="other images"),
        run(Row("x", {"method": "snclr", "neighbors": 3})),
        run(epochs=5),
        run(evaluation=Evaluation(k=20)),
    ]
    assert len({one.key for one in keys}) == len(keys)


def test_the_key_is_independent_of_environment_and_label():
    same = [run(), run(workers=7), run(threads=3), run(log_every=1), run(data="abc"), run(neighbors=10)]
    assert len({one.key for one in same}) == 1  # the recipe has 10 neighbors
    assert run(Row("another label", {"method": "snclr"})).key == run().key


def test_runs_that_differ_in_evaluation_share_the_training():
    assert run(evaluation=Evaluation(k=20)).folder == run().folder
    assert run(evaluation=Evaluation(k=20)).record_name != run().record_name
    assert run(seed=1).folder != run().folder


def test_a_record_with_another_setting_does_not_match():
    one = run()
    record = {"key": one.key, "settings": one.settings}
    assert one.is_recorded_by(record)
    older = {name: value for name, value in one.settings.items() if name != "push"}
    assert one.is_recorded_by({**record, "settings": older})  # written by a version without that setting
    assert not one.is_recorded_by({**record, "settings": {**one.settings, "push": "both"}})  # its default has changed


def test_a_renamed_setting_keeps_the_key_and_the_record():
    [earlier], [present] = parse_methods("snclr:weights=hard"), parse_methods("snclr:neighbor_weights=hard")
    one = run(present)
    assert run(earlier).key == one.key
    assert one.key.startswith("6fc9f999bc56fff4")  # as computed before the setting was renamed
    settings = {"weights" if name == "neighbor_weights" else name: value for name, value in one.settings.items()}
    assert one.is_recorded_by({"key": one.key, "settings": settings})
    assert not one.is_recorded_by({"key": one.key, "settings": {**settings, "weights": "soft"}})


def data(images: int = 50_000, classes: int | None = 10) -> DatasetInfo:
    return DatasetInfo("some", images, "abc", classes, {} if classes is None else {"neighbor_purity": 1 / classes})


def rows(table: str, recipe: str = "cifar", seen: DatasetInfo | None = None, **settings: object):
    return ablation_rows(table, resolve({"recipe": recipe, **settings}), seen or data())[0]


@pytest.mark.parametrize("table", TABLES)
def test_every_row_is_a_valid_setting_and_the_first_has_no_neighbors(table):
    entries = rows(table)
    assert entries[0].settings["sides"] == "neither"
    assert len({entry.label for entry in entries}) == len(entries)
    assert len({run(entry).training_key for entry in entries}) == len(entries)


def test_the_rules_give_the_rows_of_the_paper_on_imagenet():
    imagenet = data(1_281_167, 1000)
    seen = {"recipe": "vit-small-imagenet", "seen": imagenet}
    assert [e.settings.get("neighbors") for e in rows("neighbors", **seen)] == [None, 10, 30, 50]
    lengths = [e.settings.get("queue_length") for e in rows("queue", **seen)]
    assert lengths == [None, 8000, 16_000, 32_000, 64_000, 128_000]
    assert [e.label for e in rows("positiveness", **seen)] == ["no neighbors", "hard, K = 30", "soft, K = 30"]
    sides = [e.settings["sides"] for e in rows("sides", **seen)]
    assert sides == ["neither", "positives", "negatives", "both"]


def test_small_classes_scale_the_number_of_neighbors():
    few = [e.settings["neighbors"] for e in rows("neighbors", seen=data(1000, 100), queue_length=3200)[1:]]
    assert few == [1, 2, 4]  # 1,000 of the queue are real, 10 of them of one class: 10/128 of the paper's K
    unlabeled = [e.settings["neighbors"] for e in rows("neighbors", seen=data(1000, None))[1:]]
    assert unlabeled == [10, 30, 50]


def test_queue_lengths_lie_between_k_and_the_number_of_images():
    config = resolve({"recipe": "cifar", "neighbors": 30})
    assert queue_lengths(config, data(images=160)) == [30, 40, 80, 160]


def test_values_replace_the_rule():
    config = resolve(COMMON)
    entries, rule = ablation_rows("queue", config, data(), [64, 128])
    assert [e.label for e in entries] == ["no neighbors", "Q = 64", "Q = 128"]
    assert "--values" in rule
    for bad in ("sides", [1]), ("queue", []), ("neighbors", [0]), ("queue", [2]):
        with pytest.raises(UserError):
            ablation_rows(bad[0], config, data(), bad[1])


def test_tables_share_the_run_of_the_default_settings():
    soft = run(rows("positiveness", "demo")[2]).key
    assert soft in {run(entry).key for entry in rows("neighbors", "demo")}
    assert soft in {run(entry).key for entry in rows("queue", "demo")}
    assert soft in {run(entry).key for entry in rows("sides", "demo")}
