"""The public names of `snclr`; `__init__.py` imports each from here on first use."""

from .api.compare import ablate as ablate, compare as compare
from .api.demo import demo as demo
from .api.evaluate import detect as detect, fewshot as fewshot, finetune as finetune, knn as knn, linear as linear
from .api.export import (
    export as export,
    import_encoder as import_encoder,
    pack as pack,
    verify_shards as verify_shards,
)
from .api.lists import (
    list_encoders as list_encoders,
    list_methods as list_methods,
    list_recipes as list_recipes,
    list_studies as list_studies,
)
from .api.pretrain import doctor as doctor, plan as plan, pretrain as pretrain
from .api.report import curate as curate, explore as explore, report as report
from .api.retrieval import embed as embed, explain as explain, neighbors as neighbors, search as search
from .checkpoint.encoder_file import load_encoder as load_encoder
from .data.datasets.base import open_dataset as open_dataset
from .errors import UserError as UserError
from .methods.common.queue import (
    NeighborQueue as NeighborQueue,
    Neighbors as Neighbors,
    nearest_neighbors as nearest_neighbors,
)
from .methods.config import SoftNeighborConfig as SoftNeighborConfig
from .methods.snclr.loss import (
    SoftNeighborLoss as SoftNeighborLoss,
    contrastive_loss as contrastive_loss,
    positiveness as positiveness,
    soft_neighbor_loss as soft_neighbor_loss,
)
from .models.encoders import build_encoder as build_encoder, resolve_encoder as resolve_encoder
from .runtime.stop import StopRequested as StopRequested

__version__: str
