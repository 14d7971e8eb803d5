"""DetCo: MoCo v2 at four stages of a ResNet, between global views and shuffled local patches.

Xie, Ding, Wang, Zhan, Xu, Sun, Li, Luo: "DetCo: Unsupervised Contrastive Learning for Object Detection", ICCV 2021. The
loss of a stage is the sum of three InfoNCE terms: global to global, local to local, and local query to global key. The
total is their sum over res2 to res5, weighted by 0.1, 0.4, 0.7 and 1. Each of the eight kinds of keys (four stages,
global and local) has its own queue. A global feature is the pooled output of a stage; a local one is those of the nine
patches of the view, concatenated. Every kind has its own MLP.

The authors published no pre-training code. Inferred: two-layer heads without batch norm, one direction (view 1 to view
2) and all other settings as in MoCo v2; the grid as in PIRL, with other positions and another order for each view. The
other differences are those of `mocov2`.

x1, nine patches of x1 ── encoder ── stage 1 … 4 ── MLPs ── q_g, q_l ──────────────┐
                                                                                    ├ q_g·k_g, q_l·k_l, q_l·k_g
x2, nine patches of x2 ── momentum encoder ── … ── momentum MLPs ── k_g, k_l ──────┘ each with its queue
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.distributed.collectives import all_gather
from snclr.errors import UserError
from snclr.methods.base import MomentumMethod, StepOutput, Views
from snclr.methods.common.ema import momentum_copy
from snclr.methods.common.features import autocast_disabled, l2_normalize
from snclr.methods.common.queue import NeighborQueue
from snclr.methods.config import DetCoConfig
from snclr.methods.jigsaw.patches import PATCHES, cut_grid, join_patches, keep_running_statistics
from snclr.methods.mocov2 import queue_loss

STAGE_WEIGHTS = {"layer1": 0.1, "layer2": 0.4, "layer3": 0.7, "layer4": 1.0}
"""Weights of res2 to res5 in the loss, by the names of torchvision and timm."""


class DetCo(MomentumMethod):
    """InfoNCE at four stages: global, local, and local to global.

    `projector` and `queue` are the global ones of the last stage, `stage_projectors` and `stage_queues` those of the
    stages before it, `patch_projectors` and `patch_queues` the local ones of all four.
    """

    config: DetCoConfig
    queue: NeighborQueue
    projector_bn = False  # as in MoCo v2

    def __init__(self, encoder: nn.Module, num_features: int, config: DetCoConfig, *, seed: int) -> None:
        widths = stage_widths(encoder)
        super().__init__(encoder, num_features, config)
        self.seed = seed
        self.stage_projectors = nn.ModuleList(self.build_projector(width) for width in widths[:-1])
        self.patch_projectors = nn.ModuleList(
            nn.Sequential(join_patches(), self.build_projector(PATCHES * width)) for width in widths
        )
        self.momentum_stage_projectors = momentum_copy(self.stage_projectors)
        self.momentum_patch_projectors = momentum_copy(self.patch_projectors)
        self.stage_queues = nn.ModuleList(self.build_queue() for _ in widths[:-1])
        self.patch_queues = nn.ModuleList(self.build_queue() for _ in widths)

    def forward(self, views: Views, ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Return the weighted sum over the stages, view 1 to view 2."""
        patches = [
            cut_grid(view, ids, seed=self.seed, epoch=epoch, view=number) for number, view in enumerate(views[:2])
        ]
        with torch.no_grad():
            keys = self._project(views[1], patches[1], "momentum_")
        queries = self._project(views[0], patches[0], "")
        own = self.queue.own_entries(ids)  # all queues have the same images in the same places
        loss = torch.zeros((), device=ids.device)
        with autocast_disabled(queries[0][0]):
            for (q_g, q_l), (k_g, k_l), queues, weight in zip(
                queries, keys, self._queues(), STAGE_WEIGHTS.values(), strict=True
            ):
                n_g, n_l = (queue.candidates.to(q_g.dtype) for queue in queues)
                terms = [
                    queue_loss(q, k, negatives, own, tau=self.config.temperature)
                    for q, k, negatives in ((q_g, k_g, n_g), (q_l, k_l, n_l), (q_l, k_g, n_g))
                ]
                loss = loss + weight * torch.stack(terms).sum()
        self._to_push = all_gather(ids), *(all_gather(key) for pair in keys for key in pair)
        return StepOutput(loss=loss, features=keys[-1][0])

    def _project(self, views: Tensor, patches: Tensor, prefix: str) -> list[tuple[Tensor, Tensor]]:
        """Return the normalized global and local features (N, D) of the four stages, of one of the two networks."""
        encoder, last, lower, local = (
            self.get_submodule(prefix + name)
            for name in ("encoder", "projector", "stage_projectors", "patch_projectors")
        )
        of_views = stage_features(encoder, views)
        with keep_running_statistics(encoder):
            of_patches = stage_features(encoder, patches)
        pooled = zip(of_views, of_patches, strict=True)
        heads = zip([*lower.children(), last], local.children(), strict=True)
        return [
            (l2_normalize(head(view)), l2_normalize(patch_head(parts)))
            for (view, parts), (head, patch_head) in zip(pooled, heads, strict=True)
        ]

    def _queues(self) -> list[tuple[NeighborQueue, NeighborQueue]]:
        """Return the global and the local queue of each stage."""
        return list(zip([*self.stage_queues, self.queue], self.patch_queues, strict=True))  # type: ignore[arg-type]

    def push(self, ids: Tensor, *keys: Tensor) -> None:
        """Push the keys of each queue."""
        for queue, key in zip((queue for pair in self._queues() for queue in pair), keys, strict=True):
            queue.push(key, ids)


def stage_features(encoder: nn.Module, images: Tensor) -> list[Tensor]:
    """Return the average-pooled features (N, C_i) of the four stages; those of the last equal the encoder's output.

    torchvision's `create_feature_extractor` traces the encoder once, and batch norms that are replaced later
    (synchronized ones) are not in the trace; timm's `features_only` builds another model. Both libraries' ResNets are a
    chain of children up to the last stage.
    """
    features, x = [], images
    for name, child in encoder.named_children():
        x = child(x)
        if name in STAGE_WEIGHTS:
            features.append(F.adaptive_avg_pool2d(x, 1).flatten(1))
        if len(features) == len(STAGE_WEIGHTS):
            break
    return features


def stage_widths(encoder: nn.Module) -> list[int]:
    """Return the channels of the four stages; raise UserError if the encoder is not a ResNet."""
    from timm.models.resnet import ResNet as TimmResNet
    from torchvision.models.resnet import ResNet

    if not isinstance(encoder, (ResNet, TimmResNet)):
        raise UserError(
            f"method detco compares the four stages of a ResNet; {type(encoder).__name__} has none. Choose a ResNet"
            " such as --encoder resnet50."
        )
    training = encoder.training
    with torch.no_grad():  # in eval mode the batch norms stay as they are
        widths = [part.shape[1] for part in stage_features(encoder.eval(), torch.zeros(1, 3, 32, 32))]
    encoder.train(training)
    return widths
