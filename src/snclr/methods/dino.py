"""DINO: the student's distribution over prototypes must match the sharpened, centred one of a momentum teacher.

Caron et al.: "Emerging Properties in Self-Supervised Vision Transformers", ICCV 2021. Eq. 3 (cross-entropy of the other
view, as lightly computes it) with the centre of Eq. 4, which is averaged over all processes. The teacher's temperature
rises from 0.04 within the first epochs; the student's is `temperature`. The head is the paper's: an MLP with GELU, then
unit length, then a weight-normalised layer, which rests in the first epoch. It has batch norms where the encoder has
some, so that a ViT stays free of them, as the paper wants it.

Two views of equal size, as every method here has: the paper's local crops (multi-crop) are not built.

x1 ── encoder ── projector ── prototypes ── softmax(· / τs) ┐
                                                             ├ cross-entropy
x2 ── momentum encoder ── … projector ── … prototypes ── softmax((· − centre) / τt) ┘
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from snclr.ema import ema_update, momentum_at, momentum_copy
from snclr.heads import Prototypes, mlp
from snclr.methods.base import StepOutput
from snclr.methods.branches import TwoBranches
from snclr.methods.features import full_precision, precise, unit

WARMUP_TEMPERATURE = 0.04


def build(
    encoder: nn.Module, features: int, *, hidden: int, dim: int, projector_layers: int, prototypes: int,
    freeze_prototypes_epochs: int, temperature: float, teacher_temperature: float, teacher_warmup_epochs: int,
    center_momentum: float, momentum: float, momentum_schedule: str,
) -> DINO:  # fmt: skip
    """DINO around an encoder of that many features; `dim` is the head's bottleneck."""
    from lightly.loss.dino_loss import DINOLoss

    hidden_bn = any(isinstance(part, nn.BatchNorm2d) for part in encoder.modules())
    projector = mlp(features, hidden, dim, layers=projector_layers, hidden_bn=hidden_bn, activation=nn.GELU)
    for layer in projector:
        if isinstance(layer, nn.Linear):  # the paper's start
            nn.init.trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    criterion = DINOLoss(
        output_dim=prototypes, student_temp=temperature, teacher_temp=teacher_temperature,
        warmup_teacher_temp=min(WARMUP_TEMPERATURE, teacher_temperature),
        warmup_teacher_temp_epochs=teacher_warmup_epochs, center_momentum=center_momentum,
    )  # fmt: skip
    return DINO(
        encoder, projector, Prototypes(dim, prototypes), criterion, freeze_epochs=freeze_prototypes_epochs,
        momentum=momentum, momentum_schedule=momentum_schedule,
    )  # fmt: skip


class DINO(TwoBranches):
    """The mean of both directions; `criterion` keeps the centre."""

    queue = None

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        prototypes: Prototypes,
        criterion: nn.Module,
        *,
        freeze_epochs: int = 1,
        momentum: float = 0.996,
        momentum_schedule: str = "cosine",
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector
        self.prototypes = prototypes
        self.momentum_encoder = momentum_copy(encoder)
        self.momentum_projector = momentum_copy(projector)
        self.momentum_prototypes = momentum_copy(prototypes)
        self.criterion = criterion
        self.freeze_epochs = freeze_epochs
        self.momentum = momentum
        self.momentum_schedule = momentum_schedule

    def forward(self, views: Sequence[Tensor], ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Both directions of the loss for views (N, 3, S, S)."""
        y2_of = self.keys(views)
        y1_of = [self.projector(self.encoder(view)) for view in views]
        with full_precision(y1_of[0]):
            teacher = [self.momentum_prototypes(precise(y2)) for y2 in y2_of]
            student = [self.prototypes(precise(y1), frozen=epoch < self.freeze_epochs) for y1 in y1_of]
            loss = self.criterion(teacher, student, epoch=epoch)
        return StepOutput(loss=loss, features=unit(y2_of[1]))

    def finish_step(self, step: int, total_steps: int) -> None:
        """Move the teacher."""
        super().finish_step(step, total_steps)
        m = momentum_at(step, total_steps, self.momentum, self.momentum_schedule)
        ema_update(self.prototypes, self.momentum_prototypes, m)
