"""DINO: match the student's distribution over prototypes with the sharpened, centered one of an EMA teacher.

Caron et al.: "Emerging Properties in Self-Supervised Vision Transformers", ICCV 2021. Eq. 3 (cross-entropy with the
other view, lightly's implementation) with the center of Eq. 4, averaged over all ranks. The teacher's temperature rises
from 0.04 during its warm-up; the student's is `temperature`. The head is the paper's: an MLP with GELU, normalization,
then a weight-normalized layer that is frozen in the first epoch. It has batch norms only if the encoder has some. The
teacher's encoder is the one that is saved and evaluated. Local crops (`local_crops`) follow the two views; only the
student sees them, and each is matched with both of the teacher's views.

x1 ── encoder ── projector ── prototypes ── softmax(· / τs) ┐
                                                             ├ cross-entropy
x2 ── momentum encoder ── … projector ── … prototypes ── softmax((· − center) / τt) ┘
"""

from torch import Tensor, nn

from snclr.methods.base import MomentumMethod, StepOutput, Views
from snclr.methods.common.ema import momentum_copy
from snclr.methods.common.features import at_least_float32, autocast_disabled, l2_normalize
from snclr.methods.common.heads import Prototypes, mlp
from snclr.methods.config import DINOConfig


class DINO(MomentumMethod):
    """The mean over all pairs of a teacher's view and another view of the student.

    `dim` is the bottleneck of the head; `criterion` keeps the center.
    """

    config: DINOConfig

    def __init__(self, encoder: nn.Module, num_features: int, config: DINOConfig) -> None:
        from lightly.loss.dino_loss import DINOLoss

        super().__init__(encoder, num_features, config)
        self.prototypes = Prototypes(config.dim, config.prototypes, learned_scale=not config.norm_last_layer)
        self.momentum_prototypes = momentum_copy(self.prototypes)
        self.criterion = DINOLoss(
            output_dim=config.prototypes,
            student_temp=config.temperature,
            teacher_temp=config.teacher_temperature,
            warmup_teacher_temp=min(0.04, config.teacher_temperature),
            warmup_teacher_temp_epochs=config.teacher_warmup_epochs,
            center_momentum=config.center_momentum,
        )

    def build_projector(self, num_features: int) -> nn.Module:
        """Return the paper's head up to the bottleneck, with the paper's initialization."""
        c = self.config
        hidden_bn = any(isinstance(module, nn.BatchNorm2d) for module in self.encoder.modules())
        projector = mlp(
            num_features, c.hidden, c.dim, layers=c.projector_layers, hidden_bn=hidden_bn, activation=nn.GELU
        )
        for layer in projector:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
        return projector

    @property
    def exported_encoder(self) -> nn.Module:
        """The encoder of the teacher, or of the student if `exported` is student."""
        return self.momentum_encoder if self.config.exported == "teacher" else self.encoder

    def forward(self, views: Views, ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Return the loss of both directions, and of the local crops if there are some."""
        y2 = self.target_projections(views[:2])
        y1 = [self.project(view) for view in views]
        frozen = epoch < self.config.freeze_prototypes_epochs
        with autocast_disabled(y1[0]):
            teacher = [self.momentum_prototypes(at_least_float32(y)) for y in y2]
            student = [self.prototypes(at_least_float32(y), frozen=frozen) for y in y1]
            loss = self.criterion(teacher, student, epoch=epoch)
        return StepOutput(loss=loss, features=l2_normalize(y2[1]))
