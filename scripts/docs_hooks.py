"""mkdocs hook: replace `<!-- generate: NAME -->` in a page by a table that is made from the code.

The names are those of `GENERATORS`. `mkdocs.yml` lists this file under `hooks`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"<!-- generate: (\w+) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace every mark of a page. Called by mkdocs."""
    return MARK.sub(lambda mark: GENERATORS[mark[1]](), markdown)


def settings() -> str:
    """All settings by group, with default, choices and the methods that use them."""
    from snclr.methods.config import METHODS
    from snclr.train.config import setting_groups

    parts = []
    for title, group in setting_groups().items():
        parts.append(f"## {title}\n")
        rows = []
        for setting in group.values():
            users = [name for name, config in METHODS.items() if setting.name in config.setting_names()]
            used = f" Methods: {', '.join(users)}." if users else ""
            rows.append(
                (f"`--{setting.name.replace('_', '-')}`", _values(setting), _default(setting), setting.help + used)
            )
        parts.append(_table(("flag", "values", "default", "meaning"), rows))
    return "\n".join(parts)


def methods() -> str:
    """All methods with their paper and the values of that paper."""
    from snclr.methods.config import METHODS
    from snclr.train.config import all_settings

    shared = all_settings()
    rows = []
    for name, config in METHODS.items():
        defaults = {f.name: f.default for f in dataclasses.fields(config)}
        own = [f"{setting} {value}" for setting, value in defaults.items() if value != shared[setting].default]
        rows.append((f"`{name}`", config.paper(), ", ".join(own) or "–"))
    return _table(("method", "paper", "settings that differ from the shared defaults"), rows)


def recipes() -> str:
    """All recipes with their main settings and summaries."""
    from snclr.recipes import RECIPES
    from snclr.train.config import resolve

    rows = []
    for name in RECIPES:
        c = resolve({"recipe": name})
        rows.append((
            f"`{name}`", f"{c.encoder}, {c.image_size} px", f"{c.batch_size}, {c.epochs}",
            f"{c.optimizer}, {c.lr:g}, {c.weight_decay:g}", f"{c.neighbors}, {c.queue_length:,}, {c.dim}",
            RECIPES[name].summary,
        ))  # fmt: skip
    head = ("recipe", "encoder, image size", "batch, epochs", "optimizer, base lr, weight decay", "K, Q, D", "for")
    return _table(head, rows)


def views() -> str:
    """The augmentations of every value of `--views`; "a / b" if the two views differ."""
    from snclr.data.transforms.views import VIEW_GROUPS

    names = {
        "crop_min": "smallest crop, share of the area", "flip": "horizontal flip", "jitter": "color jitter",
        "brightness": "range of brightness", "contrast": "of contrast", "saturation": "of saturation", "hue": "of hue",
        "grayscale": "grayscale", "blur": "blur", "solarize": "solarize", "randaugment": "each RandAugment operation",
    }  # fmt: skip
    rows = []
    for name, title in names.items():
        cells = []
        for one, other in VIEW_GROUPS.values():
            a, b = getattr(one, name), getattr(other, name)
            unused = name in ("brightness", "contrast", "saturation", "hue") and one.jitter == 0
            cells.append("–" if unused else f"{a:g}" if a == b else f"{a:g} / {b:g}")
        rows.append((title, *cells))
    return _table(("transform", *(f"`{name}`" for name in VIEW_GROUPS)), rows)


def cli() -> str:
    """The help of every command."""
    from snclr.cli.main import COMMANDS

    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(_help, COMMANDS))
    return "\n".join(f"## snclr {name}\n\n```text\n{text}\n```\n" for name, text in zip(COMMANDS, texts, strict=True))


def systems() -> str:
    """The systems of the paper's tables: which tests cover them, the paper's results, and official ones that differ."""
    tested = method_tests()
    rows = []
    for system in paper_systems():
        covered = ["yes" if system.method in methods else "–" for methods in tested.values()]
        sources = dict.fromkeys(entry.source for entry in system.official)
        official = "; ".join([*(entry.result for entry in system.official), *sources])
        rows.append((system.label, f"`{system.flags}`", *covered, "; ".join(system.reported), official or "–"))
    head = ("system", "flags", *tested, "in the paper", "official, if it differs")
    return _table(head, rows)


class Official(NamedTuple):
    """A linear top-1 on ImageNet that a method's own repository reports."""

    result: str
    source: str


_MOCO, _MOCO_V3 = "github.com/facebookresearch/moco README", "github.com/facebookresearch/moco-v3 CONFIG.md"
OFFICIAL: dict[str, tuple[Official, ...]] = {
    "simclr": (Official("ResNet-50 69.1", "github.com/google-research/simclr README"),),
    "moco": (Official("ResNet-50 60.8 (200 epochs)", _MOCO),),
    "mocov2": (Official("ResNet-50 67.5 / 71.1 (200 / 800 epochs, loss of one direction)", _MOCO),),
    "mocov3": (
        Official("ResNet-50 68.9 / 72.8 (100 / 300 epochs)", _MOCO_V3),
        Official("ViT-S 73.2, ViT-B 76.7 (300 epochs)", _MOCO_V3),
    ),
    "byol": (
        Official("ResNet-50 74.4 (released weights)", "github.com/google-deepmind/deepmind-research byol/README"),
    ),
    "swav": (Official("ResNet-50 70.1 (400 epochs, two crops)", "github.com/facebookresearch/swav README"),),
    "barlowtwins": (Official("ResNet-50 73.3 (1000 epochs)", "github.com/facebookresearch/barlowtwins README"),),
    "dino": (Official("ViT-S 76.1 (300 epochs, multi-crop)", "github.com/facebookresearch/dino README"),),
    "mae": (Official("ViT-B 67.8 (1600 epochs)", "github.com/facebookresearch/mae FINETUNE.md"),),
    "cae": (Official("ViT-B 64.5 (300 epochs)", "github.com/Atten4Vis/CAE README"),),
}
"""Only results that differ from those of the paper."""

_ENCODERS = {"resnet50-imagenet": "ResNet-50", "vit-small-imagenet": "ViT-S", "vit-base-imagenet": "ViT-B"}


class PaperSystem(NamedTuple):
    """A system of the paper's Tables 1 to 3."""

    label: str
    method: str
    flags: str
    """Flags of `snclr pretrain` that select it."""
    reported: list[str]
    """The paper's results in words: linear top-1 (Table 1), or box AP (Table 3) of systems that are not in Table 1."""

    @property
    def official(self) -> tuple[Official, ...]:
        """Figures of its own repository, if they differ from the paper's."""
        return () if "infomin" in self.flags else OFFICIAL.get(self.method, ())


def paper_systems() -> list[PaperSystem]:
    """Return the systems of the paper's Tables 1 to 3 in the order of their first row."""
    from snclr.studies.paper import named_studies
    from snclr.studies.runs import UNTRAINED

    systems: dict[str, PaperSystem] = {}
    for table in named_studies().values():
        metric = "linear" if "linear" in table.measures else "AP_bb"
        for row in table.systems:
            if row.reported and row.method != UNTRAINED:
                label = row.label.split(" at ")[0].split(" (")[0].rstrip("*")
                found = systems.setdefault(label, PaperSystem(label, row.method, _flags(row), []))
                if "linear" in table.measures or (table.needs_coco and not found.reported):
                    name = row.label.partition(" (")[2].rstrip(")") or _ENCODERS[table.settings["recipe"]]
                    found.reported.append(f"{name} {_describe_results(row, metric)}")
    return list(systems.values())


def _flags(row: Any) -> str:
    given = {name: value for name, value in row.settings.items() if name == "views"}
    return " ".join([f"--method {row.method}", *(f"--{name} {value}" for name, value in given.items())])


def _describe_results(row: Any, metric: str) -> str:
    """Return a system's results of one metric with their epochs, e.g. `69.6 / 72.4 (100 / 200 epochs)`."""
    values = " / ".join(str(reported[metric]) for reported in row.reported.values())
    unit = "" if metric == "linear" else "box AP "
    return f"{unit}{values} ({' / '.join(map(str, row.reported))} epochs)"


TESTS = {
    "trains": ("tests/methods", "learn"),
    "resume": ("tests/methods", "resume"),
    "ranks": ("tests/distributed/test_methods_ranks.py", ""),
}
"""Column of the table of systems: where its tests are, and a part of their names."""


def method_tests() -> dict[str, set[str]]:
    """Return the methods that each kind of test covers, from the tests that pytest collects.

    A test covers a method if it is its first parameter or a word of the test's name.
    """
    from snclr.methods.config import METHODS

    folders = list(dict.fromkeys(folder for folder, _ in TESTS.values()))
    options = ["--collect-only", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *folders], cwd=ROOT, check=True, capture_output=True, text=True
    )
    covered: dict[str, set[str]] = {column: set() for column in TESTS}
    for node in re.finditer(r"^(\S+?)::(\w+)(?:\[([^-\]]+).*)?$", done.stdout, flags=re.MULTILINE):
        path, name, parameter = node.groups()
        words = {*name.split("_"), parameter}
        for column, (folder, part) in TESTS.items():
            if path.startswith(folder) and part in name:
                covered[column] |= words & METHODS.keys()
    return covered


GENERATORS: dict[str, Callable[[], str]] = {
    "settings": settings,
    "methods": methods,
    "recipes": recipes,
    "views": views,
    "cli": cli,
    "systems": systems,
}


def _help(command: str) -> str:
    environment = {**os.environ, "COLUMNS": "84", "NO_COLOR": "1", "TERM": "dumb"}
    arguments = [sys.executable, "-m", "snclr", command, "--help"]
    return subprocess.run(arguments, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def _values(setting: Any) -> str:
    kinds = [{"NoneType": "none", "str": "text"}.get(kind.__name__, kind.__name__) for kind in setting.types]
    return ", ".join([*(f"`{choice}`" for choice in setting.choices), *kinds])


def _default(setting: Any) -> str:
    return "–" if setting.default in (None, "") else f"`{setting.default}`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
