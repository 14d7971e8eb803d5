"""The keyword arguments that the evaluation functions share."""

from __future__ import annotations

import inspect

import pytest

import snclr
from snclr.evaluation.session import open_session


@pytest.mark.parametrize("name", ["knn", "linear", "fewshot", "finetune", "embed", "search", "neighbors"])
def test_the_shown_options_are_those_of_a_session(name) -> None:
    accepted = dict(inspect.signature(open_session).parameters)
    if name == "finetune":  # extracts no features that could be cached
        del accepted["cache"]
    if name not in ("knn", "linear", "fewshot"):
        del accepted["precision"]
    function = getattr(snclr, name)
    shown = inspect.signature(function).parameters
    for option, parameter in accepted.items():
        assert shown[option].default == parameter.default
        assert f"\n    {option}: " in function.__doc__
    assert "options" not in shown


def test_an_unknown_option_is_rejected(run) -> None:
    with pytest.raises(TypeError, match="wokers"):
        snclr.knn(run, wokers=2)
