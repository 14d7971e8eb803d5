"""ARCHITECTURE.md's one-way flow, read from the imports themselves, those within functions too."""

import ast
from pathlib import Path

import pytest

import snclr

PACKAGE = Path(snclr.__file__).parent
SMALL = {"errors", "durable", "progress", "distributed", "devices", "json_values"}
"""What anyone may use: errors, files, progress, other processes, devices, checks of what JSON holds."""


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
        ("devices", {"errors"}),
        ("json_values", set()),
        ("data", SMALL),
        ("encoders", {"errors", "vits"}),
        ("methods", SMALL | {"soft_neighbors", "streaming", "heads", "ema"}),
        ("recipes", {"errors"}),
        ("train", SMALL | {"config", "data", "methods", "encoders", "sync_batch_norm", "export"}),
        ("evaluate", SMALL | {"data", "encoders", "soft_neighbors", "streaming", "sync_batch_norm", "export", "train"}),
        ("export", SMALL | {"data", "encoders", "vits", "train"}),
        ("report", SMALL | {"data", "export", "train", "evaluate"}),
        ("detection", SMALL | {"data", "encoders", "sync_batch_norm", "export", "train", "report"}),
        ("comparison", SMALL | {"config", "data", "methods", "export", "train", "evaluate"}),
    ],
)
def test_a_part_imports_only_what_stands_before_it(part, allowed):
    used = {name.split(".")[0] for path in files(part) for name in imports(path) if not is_call(path, name)}
    assert used - {part} <= allowed


def is_call(path, name):
    """`snclr.export` and `snclr.report` are parts and functions: called, they go to the command."""
    return path.name == "__init__.py" and name == f"commands.{path.parent.name}"


def test_training_and_export_know_each_other_by_three_files_only():
    between = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for part, other in (("train", "export."), ("export", "train."))
        for path in files(part)
        for name in imports(path)
        if name.startswith(other)
    }
    assert between == {
        ("train/pretrain.py", "export.encoder"),
        ("train/inputs.py", "export.foreign"),
        ("export/encoder.py", "train.tensor_file"),
    }


@pytest.mark.parametrize("part", ["evaluate", "report", "detection"])
def test_what_is_borrowed_from_training_is_small(part):
    used = {name for path in files(part) for name in imports(path) if name.split(".")[0] == "train"}
    small = ("checkpoint", "optim", "run_folder", "saved_run", "schedule", "signals")
    assert used - {"train"} <= {f"train.{name}" for name in small}


def test_evaluation_does_not_know_the_methods_and_the_loop_not_which_it_runs():
    for part in ("evaluate", "train/loop"):
        used = {name for path in files(part) for name in imports(path)}
        assert not {name for name in used if name.startswith("methods.") and name != "methods.base"}
