"""The generated table of the paper's systems: its evidence comes from the tests that pytest collects."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from snclr.methods import METHODS


@pytest.fixture(scope="module")
def hooks():
    path = Path(__file__).resolve().parents[2] / "scripts" / "docs_hooks.py"
    spec = importlib.util.spec_from_file_location("docs_hooks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tested(hooks) -> dict[str, set[str]]:
    return hooks.method_tests()


def test_the_evidence_is_found_by_the_parameters_of_tests(tested):
    assert list(tested) == ["trains", "resume", "ranks"]
    for column, methods in tested.items():
        assert {"snclr", "simclr", "mocov3", "byol", "swav", "dino", "supervised"} <= methods <= METHODS.keys(), column


def test_the_table_claims_a_test_only_where_pytest_collects_one(hooks, tested, monkeypatch):
    monkeypatch.setattr(hooks, "method_tests", lambda: {**tested, "resume": tested["resume"] - {"byol"}})
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in hooks.systems().splitlines()[2:]]
    rows = {row[0]: row for row in table}
    assert rows["BYOL"][2:5] == ["yes", "–", "yes"]
    assert rows["SimCLR"][2:5] == ["yes", "yes", "yes"]
    assert rows["InfoMin Aug"][1] == "`--method mocov2 --views infomin`"
    assert "ViT-S 67.5 / 71.8 / 72.5 (100 / 200 / 300 epochs)" in rows["MoCo v3"][5]
    assert "ViT-S 73.2" in rows["MoCo v3"][6]
    assert "facebookresearch/moco-v3 CONFIG.md" in rows["MoCo v3"][6]


def test_the_systems_are_the_sixteen_of_the_paper_and_supervised(hooks):
    systems = {system.label: system for system in hooks.paper_systems()}
    assert len(systems) == 17
    assert hooks.OFFICIAL.keys() <= {system.method for system in systems.values()}
    assert systems["Barlow Twins"].reported == ["ResNet-50 72.5 / 73.2 (400 / 800 epochs)"]
    assert systems["DetCo"].reported == ["ResNet-50 box AP 39.4 (200 epochs)"]
    assert systems["MAE"].reported == ["ViT-B 61.5 (300 epochs)", "ViT-L 57.3 / 64.4 / 67.3 (100 / 200 / 300 epochs)"]
    for system in systems.values():
        assert system.method in METHODS
        assert all(entry.source.startswith("github.com/") for entry in system.official)
