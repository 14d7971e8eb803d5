"""Lightning Fabric, without the third of its start-up time that nothing here needs.

Fabric imports torchmetrics, which imports SciPy's signal processing and torchvision, only to ask for its version. While
Fabric is imported a stand-in tells it that version; afterwards torchmetrics is there for whoever wants it.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

__all__ = ["ClusterEnvironment", "DDPStrategy", "Fabric", "SLURMEnvironment"]


@contextmanager
def _version_alone(package: str) -> Iterator[None]:
    """Within the block, importing `package` gives its version and nothing else; one already imported is left alone."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version is None or package in sys.modules:
        yield
        return
    stand_in = ModuleType(package)
    stand_in.__version__ = version  # type: ignore[attr-defined]
    sys.modules[package] = stand_in
    try:
        yield
    finally:
        del sys.modules[package]


with _version_alone("torchmetrics"):
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning_fabric.strategies.ddp import DDPStrategy
