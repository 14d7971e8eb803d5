"""ARCHITECTURE.md's one-way flow, read from the imports themselves, those within functions too."""

import ast
from pathlib import Path

import pytest

import snclr

PACKAGE = Path(snclr.__file__).parent
SMALL = {"errors", "durable", "progress", "distributed"}
"""What anyone may use: errors, files, progress, other processes."""


def imports(path):
    """Names below `snclr.` that a file imports, as dotted paths."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("snclr.") for alias in node.names if alias.name.startswith("snclr.")}
        elif isinstance(node, ast.ImportFrom) and node.module == "snclr":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("snclr."):
            found.add(node.module.removeprefix("snclr."))
    return found


def files(name):
    place = PACKAGE / name
    return sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]


@pytest.mark.parametrize(
    ("part", "allowed"),
    [
        ("errors", set()),
        ("streaming", set()),
        ("soft_neighbors", {"errors", "streaming"}),  # the method on one page needs nothing of ours but its kernels
        ("data", SMALL),
        ("encoders", {"errors", "vits"}),
        ("methods", SMALL | {"soft_neighbors", "streaming", "heads", "ema"}),
        ("recipes", {"errors"}),
        ("train", SMALL | {"config", "data", "methods", "encoders", "sync_batch_norm", "export"}),
        ("evaluate", SMALL | {"data", "encoders", "soft_neighbors", "streaming", "sync_batch_norm", "export", "train"}),
    ],
)
def test_a_part_imports_only_what_stands_before_it(part, allowed):
    used = {name.split(".")[0] for path in files(part) for name in imports(path)}
    assert used - {part} <= allowed


def test_evaluation_does_not_know_the_methods_and_the_loop_not_which_it_runs():
    for part in ("evaluate", "train/loop"):
        used = {name for path in files(part) for name in imports(path)}
        assert not {name for name in used if name.startswith("methods.") and name != "methods.base"}
