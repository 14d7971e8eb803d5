"""SNCLR: self-supervised image encoders with soft neighbors as positive supporters (ICLR 2023).

Every name in `__all__` is imported on first use, so `import snclr` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "api.compare": "ablate compare",
    "api.demo": "demo",
    "api.detect": "detect",
    "api.evaluate": "finetune knn linear",
    "api.explore": "curate explore",
    "api.export": "export",
    "api.pack": "pack verify_shards",
    "api.pretrain": "plan pretrain",
    "api.report": "report",
    "api.retrieval": "embed explain neighbors search",
    "checkpoint.encoder_file": "load_encoder",
    "data.datasets.base": "open_dataset",
    "errors": "UserError",
    "methods.config": "SoftNeighborConfig",
    "methods.snclr.loss": "SoftNeighborLoss contrastive_loss positiveness soft_neighbor_loss",
    "methods.snclr.queue": "NeighborQueue Neighbors nearest_neighbors",
    "models.encoders": "build_encoder resolve_encoder",
    "runtime.stop": "StopRequested",
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names.split()}

__all__ = [
    "NeighborQueue", "Neighbors", "SoftNeighborConfig", "SoftNeighborLoss", "StopRequested", "UserError", "__version__",
    "ablate", "build_encoder", "compare", "contrastive_loss", "curate", "demo", "detect", "embed", "explain",
    "explore", "export",
    "finetune", "knn", "linear", "load_encoder", "nearest_neighbors", "neighbors", "open_dataset", "pack", "plan",
    "positiveness", "pretrain", "report", "resolve_encoder", "search", "soft_neighbor_loss", "verify_shards",
]  # fmt: skip

if TYPE_CHECKING:
    from snclr.api.compare import ablate, compare
    from snclr.api.demo import demo
    from snclr.api.detect import detect
    from snclr.api.evaluate import finetune, knn, linear
    from snclr.api.explore import curate, explore
    from snclr.api.export import export
    from snclr.api.pack import pack, verify_shards
    from snclr.api.pretrain import plan, pretrain
    from snclr.api.report import report
    from snclr.api.retrieval import embed, explain, neighbors, search
    from snclr.checkpoint.encoder_file import load_encoder
    from snclr.data.datasets.base import open_dataset
    from snclr.errors import UserError
    from snclr.methods.config import SoftNeighborConfig
    from snclr.methods.snclr.loss import SoftNeighborLoss, contrastive_loss, positiveness, soft_neighbor_loss
    from snclr.methods.snclr.queue import NeighborQueue, Neighbors, nearest_neighbors
    from snclr.models.encoders import build_encoder, resolve_encoder
    from snclr.runtime.stop import StopRequested


def __getattr__(name: str) -> Any:
    """Import the name from its module on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'snclr' has no attribute {name!r}")
    return getattr(importlib.import_module(f"snclr.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
