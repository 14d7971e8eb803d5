"""The systems that the paper compares, with all results that it reports for each and those of official repositories."""

from __future__ import annotations

from dataclasses import dataclass, field

from snclr.studies.paper.reported import OFFICIAL, TABLES, Official, System
from snclr.studies.runs import UNTRAINED

_ENCODERS = {"resnet50-imagenet": "ResNet-50", "vit-small-imagenet": "ViT-S", "vit-base-imagenet": "ViT-B"}


@dataclass
class PaperSystem:
    """A system of the paper's Tables 1 to 3."""

    label: str
    method: str
    flags: str
    """Flags of `snclr pretrain` that select it."""
    reported: list[str] = field(default_factory=list)
    """The paper's results in words: linear top-1 (Table 1), or box AP (Table 3) of systems that are not in Table 1."""

    @property
    def official(self) -> tuple[Official, ...]:
        """Figures of its own repository, if they differ from the paper's."""
        return () if "infomin" in self.flags else OFFICIAL.get(self.method, ())


def paper_systems() -> list[PaperSystem]:
    """Return the systems of the paper's Tables 1 to 3 in the order of their first row."""
    systems: dict[str, PaperSystem] = {}
    for table in TABLES:
        for row in table.systems:
            if row.method != UNTRAINED:
                label = row.label.split(" at ")[0].split(" (")[0].rstrip("*")
                found = systems.setdefault(label, PaperSystem(label, row.method, _flags(row)))
                if table.metrics[0] == "linear" or (table.metrics[0] == "AP_bb" and not found.reported):
                    name = row.label.partition(" (")[2].rstrip(")") or _ENCODERS[table.recipe]
                    found.reported.append(f"{name} {_describe_results(row, table.metrics[0])}")
    return list(systems.values())


def _flags(row: System) -> str:
    given = {name: value for name, value in row.settings.items() if name == "views"}
    return " ".join([f"--method {row.method}", *(f"--{name} {value}" for name, value in given.items())])


def _describe_results(row: System, metric: str) -> str:
    """Return a system's results of one metric with their epochs, e.g. `69.6 / 72.4 (100 / 200 epochs)`."""
    values = " / ".join(str(reported[metric]) for reported in row.reported.values())
    unit = "" if metric == "linear" else "box AP "
    return f"{unit}{values} ({' / '.join(map(str, row.reported))} epochs)"
