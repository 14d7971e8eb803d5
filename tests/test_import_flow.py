"""The one-way import flow of ARCHITECTURE.md, read from every import in the package, also those inside functions."""

import ast
from pathlib import Path

import pytest

import snclr

PACKAGE = Path(snclr.__file__).parent
LAYERS = (
    {"errors"},
    {"io", "runtime"},
    {"distributed"},
    {"methods", "models", "data", "recipes"},
    {"checkpoint"},
    {"train"},
    {"evaluation", "diagnostics"},
    {"exporters"},
    {"reports"},
    {"explorer"},
    {"studies"},
    {"api"},
    {"cli"},
)
"""A package imports packages of earlier layers only; packages of one layer do not import each other."""
RANK = {package: rank for rank, layer in enumerate(LAYERS) for package in layer}


def imported_packages(path):
    """Yield the packages directly below `snclr` that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "snclr":
            modules = [f"snclr.{alias.name}" for alias in node.names if not alias.name.startswith("__")]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        yield from (module.split(".")[1] for module in modules if module.startswith("snclr."))


@pytest.mark.parametrize("package", sorted(RANK))
def test_a_package_imports_only_earlier_layers(package):
    place = PACKAGE / package
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    assert files
    wrong = {
        f"{path.relative_to(PACKAGE)} imports {other}"
        for path in files
        for other in imported_packages(path)
        if other != package and RANK[other] >= RANK[package]
    }
    assert sorted(wrong) == []


def test_every_package_has_a_layer():
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert packages | modules == set(RANK)


def test_no_folder_has_more_than_about_a_dozen_modules():
    crowded = {
        str(folder.relative_to(PACKAGE)): count
        for folder in [PACKAGE, *PACKAGE.rglob("*/")]
        if (count := len([path for path in folder.glob("*.py") if path.name != "__init__.py"])) > 14
    }
    assert crowded == {}
