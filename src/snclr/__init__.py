"""SNCLR: self-supervised image encoders with soft neighbours as positive supporters (ICLR 2023).

Every name below is imported when it is first used, so `import snclr` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "NeighborQueue": "soft_neighbors",
    "Neighbors": "soft_neighbors",
    "SoftNeighborLoss": "soft_neighbors",
    "SoftNeighborSettings": "soft_neighbors",
    "contrastive_loss": "soft_neighbors",
    "nearest_neighbors": "soft_neighbors",
    "positiveness": "soft_neighbors",
    "soft_neighbor_loss": "soft_neighbors",
    "build_encoder": "encoders",
    "resolve_encoder": "encoders",
    "load_encoder": "export.encoder",
    "open_source": "data.sources",
    "pretrain": "train.pretrain",
    "knn": "commands.knn",
    "linear": "commands.linear",
    "neighbors": "commands.neighbors",
    "demo": "commands.demo",
    "plan": "commands.plan",
    "export": "commands.export",
    "finetune": "commands.finetune",
    "embed": "commands.embed",
    "search": "commands.search",
    "explain": "commands.explain",
    "detect": "commands.detect",
    "compare": "commands.compare",
    "ablate": "commands.ablate",
    "pack": "commands.pack",
    "report": "commands.report",
    "UserError": "errors",
}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from snclr.commands.ablate import ablate as ablate
    from snclr.commands.compare import compare as compare
    from snclr.commands.demo import demo as demo
    from snclr.commands.detect import detect as detect
    from snclr.commands.embed import embed as embed
    from snclr.commands.explain import explain as explain
    from snclr.commands.export import export as export
    from snclr.commands.finetune import finetune as finetune
    from snclr.commands.knn import knn as knn
    from snclr.commands.linear import linear as linear
    from snclr.commands.neighbors import neighbors as neighbors
    from snclr.commands.pack import pack as pack
    from snclr.commands.plan import plan as plan
    from snclr.commands.report import report as report
    from snclr.commands.search import search as search
    from snclr.data.sources import open_source as open_source
    from snclr.encoders import build_encoder as build_encoder
    from snclr.encoders import resolve_encoder as resolve_encoder
    from snclr.errors import UserError as UserError
    from snclr.export.encoder import load_encoder as load_encoder
    from snclr.soft_neighbors import NeighborQueue as NeighborQueue
    from snclr.soft_neighbors import Neighbors as Neighbors
    from snclr.soft_neighbors import SoftNeighborLoss as SoftNeighborLoss
    from snclr.soft_neighbors import SoftNeighborSettings as SoftNeighborSettings
    from snclr.soft_neighbors import contrastive_loss as contrastive_loss
    from snclr.soft_neighbors import nearest_neighbors as nearest_neighbors
    from snclr.soft_neighbors import positiveness as positiveness
    from snclr.soft_neighbors import soft_neighbor_loss as soft_neighbor_loss
    from snclr.train.pretrain import pretrain as pretrain


def __getattr__(name: str) -> Any:
    """Import the name from its module on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'snclr' has no attribute {name!r}")
    return getattr(importlib.import_module(f"snclr.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
