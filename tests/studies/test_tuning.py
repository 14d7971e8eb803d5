"""Equal tuning: every row has equally many trials, whichever settings its method has."""

from __future__ import annotations

from typing import Any

import pytest

from snclr.errors import UserError
from snclr.studies.conditions import best_settings, count_trials, parse_tune, row_trials
from snclr.studies.runs import Evaluation as E
from snclr.studies.runs import Row, make_run, parse_methods

SEED = 1_000_000


def trials(tune: list[str], methods: str) -> list[list[tuple[dict[str, Any], int]]]:
    axes = parse_tune(tune)
    made = []
    for row in parse_methods(methods):
        settings = make_run(row, SEED, {"recipe": "demo", "data": "demo"}, data="abc", evaluation=E()).settings
        made.append(row_trials(row, axes, settings, SEED))
    return made


def test_a_grid_has_every_combination_in_one_flag_or_several():
    expected = [({"lr": lr, "momentum": m}, SEED) for lr in (0.1, 0.2) for m in (0.9, 0.99)]
    assert trials(["lr=0.1,0.2", "momentum=0.9,0.99"], "snclr") == [expected]
    assert trials(["lr=0.1,0.2,momentum=0.9,0.99"], "snclr") == [expected]


def test_a_row_without_a_setting_repeats_its_trials_with_further_seeds():
    tune = ["lr=0.1,0.2", "momentum=0.9,0.95,0.99"]
    with_momentum, without = trials(tune, "snclr,simclr")
    assert len(with_momentum) == len(without) == count_trials(parse_tune(tune)) == 6
    assert without == [({"lr": lr}, SEED + i) for lr in (0.1, 0.2) for i in range(3)]
    assert len({(repr(tried), seed) for tried, seed in without}) == 6  # no run is repeated in vain


def test_an_alternative_replaces_a_setting_that_a_method_does_not_have():
    momentum, temperature, decay = trials(
        ["momentum=0.9,0.99/temperature=0.1,0.3/weight_decay=0.1,0.2"], "byol,simclr,simsiam"
    )
    assert [list(tried) for tried, _ in (*momentum, *temperature, *decay)] == [
        [name] for name in ("momentum", "momentum", "temperature", "temperature", "weight_decay", "weight_decay")
    ]
    assert {seed for _, seed in (*momentum, *temperature, *decay)} == {SEED}


def test_an_alternative_is_not_tuned_twice():
    [row] = trials(["weight_decay=0.1,0.2", "temperature=0.1,0.3/weight_decay=0.1,0.2"], "simsiam")
    assert [seed - SEED for _, seed in row] == [0, 1, 0, 1]


def test_a_factor_multiplies_the_rows_own_value():
    first, second = trials(["temperature=x0.5,x2"], "simclr,mocov3")
    assert [tried["temperature"] for tried, _ in first] == [0.25, 1.0]
    assert [tried["temperature"] for tried, _ in second] == [0.5, 2.0]
    assert [tried["neighbors"] for tried, _ in trials(["neighbors=x0.5,x1,x3"], "snclr")[0]] == [5, 10, 30]


def test_an_untrained_row_has_no_trials():
    assert trials(["lr=0.1,0.2"], "random") == [[]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr", "--tune takes"),
        ("lr=0.1", "--tune takes"),
        ("lr=0.1,0.1", "--tune takes"),
        ("lr=0.1,0.2,0.1", "--tune takes"),
        ("epochs=1,2", "same for all rows"),
        ("seed=1,2", "same for all rows"),
        ("threads=1,2", "same for all rows"),
        ("lr=0.1,0.2,lr=0.3,0.4", "names lr twice"),
        ("momentum=0.9,0.99/weight_decay=0.1,0.2,0.3", "equally many values"),
        ("momentun=0.9,0.99", "did you mean 'momentum'"),
    ],
)
def test_invalid_grids_are_rejected(text, message):
    with pytest.raises(UserError, match=message):
        parse_tune([text])


def test_conflicts_with_the_row_are_rejected():
    with pytest.raises(UserError, match="both set lr"):
        trials(["lr=0.1,0.2"], "snclr:lr=0.3")
    with pytest.raises(UserError, match="momentum=auto, which is not a number"):
        trials(["momentum=x0.5,x1"], "snclr")


def test_the_best_mean_over_seeds_is_chosen():
    a, b = {"lr": 0.1}, {"lr": 0.2}
    assert best_settings([(a, 0.9), (a, 0.1), (b, 0.6), (b, 0.5)]) == b  # one lucky run does not decide
    assert best_settings([(a, 0.5), (a, 0.5), (b, 0.5), (b, 0.5)]) == a
    assert best_settings([(a, 0.7), (b, 0.6)]) == a


def test_a_row_without_any_axis_still_has_its_seeds():
    axes = parse_tune(["momentum=0.9,0.99"])
    row = Row("simclr", {"method": "simclr"})
    assert row_trials(row, axes, {"lr": 0.1}, SEED) == [({}, SEED), ({}, SEED + 1)]
