"""Settings of the methods: one keyword-only dataclass per method, and `METHODS`, the registry.

All settings are in this one module, and it does not import torch: `snclr pretrain --help` lists every method's settings
and starts faster without torch. `implementation` names the class that takes the config.

The defaults of a method are its own paper's values for ResNets; `paper_settings.py` has those that depend on the run.
Fields with the same name mean the same in every method; the docstring below the first is the help text of the flag.
"""

from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from snclr.errors import UserError
from snclr.runtime.settings import Count, NonNegative, NonNegativeInt, Positive, Range, Settings, check_fields

MethodName = Literal[
    "snclr", "simclr", "moco", "mocov2", "mocov3", "byol", "simsiam", "nnclr", "swav", "barlowtwins", "dino", "mae",
    "cae", "pirl", "detco", "supervised",
]  # fmt: skip
MomentumSchedule = Literal["constant", "cosine"]
LossForm = Literal["inside", "outside"]
AtLeastTwo = Annotated[int, Range(ge=2)]
Momentum = Annotated[float, Range(ge=0, le=1)] | Literal["auto"]
Sides = Literal["both", "positives", "negatives", "other-negatives", "neither"]


class MethodConfig(Settings):
    """Base of every method's settings. The docstring of a method's config gives paper, venue and equation."""

    implementation: ClassVar[str]
    """module:class of the method."""
    needs_labels: ClassVar[bool] = False
    masks_patches: ClassVar[bool] = False
    """Whether the method hides patches: it then takes one view, and plain ViTs only."""
    takes: ClassVar[tuple[str, ...]] = ()
    """What the class takes beside encoder, width and config: classes (their number), images (their number), seed."""

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def setting_names(cls) -> frozenset[str]:
        """Return the names of the settings that the method uses."""
        return frozenset(f.name for f in fields(cls))

    @classmethod
    def paper(cls) -> str:
        """Return title, venue and the implemented equation."""
        return (cls.__doc__ or "").rstrip(".")


# Groups of settings that several methods share.


class ProjectorConfig(MethodConfig):
    """Size of the projector."""

    hidden: Count = 4096
    """Hidden units of the projector. The predictor has as many (nnclr: twice as many; simsiam: a quarter of --dim)."""
    dim: AtLeastTwo = 256
    """Output features of the projector (D), which the loss compares."""
    projector_layers: Count = 2
    """Linear layers of the projector."""


class FinalNormConfig(ProjectorConfig):
    """A projector that may end with a batch norm."""

    final_bn: bool = False
    """End the projector with a batch norm."""
    final_bias: bool = True
    """Give the last linear layer of projector and predictor a bias; a final batch norm replaces it."""


class PredictorConfig(FinalNormConfig):
    """Projector and predictor."""

    predictor_layers: NonNegativeInt = 2
    """Linear layers of the predictor; 0: no predictor."""
    predictor_final_bn: bool = False
    """End the predictor with a batch norm (not in nnclr and simsiam)."""


class QueueConfig(MethodConfig):
    """A queue of earlier features."""

    queue_length: Count = 128_000
    """Number of features in the queue (Q). The default is reduced to the number of images if there are fewer."""
    queue_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Data type of the features in the queue."""


class MomentumConfig(MethodConfig):
    """A target network that follows the online network by EMA."""

    momentum: Momentum = 0.99
    """EMA momentum of the target network; auto: 1 − batch size / (0.32 × images), between 0.5 and 0.999."""
    momentum_schedule: MomentumSchedule = "constant"
    """Keep the momentum constant, or raise it to 1 along a cosine."""


class PrototypeConfig(MethodConfig):
    """Learned prototypes."""

    prototypes: AtLeastTwo = 512
    """Number of prototypes (swav, dino)."""
    freeze_prototypes_epochs: NonNegativeInt = 1
    """Epochs in which the prototypes are not trained."""


class MultiCropConfig(MethodConfig):
    """Additional small views, which only the trained network sees."""

    local_crops: NonNegativeInt = 0
    """Small views of each image beside the two usual ones (multi-crop). Their crops cover 5 % of the image up to
    --crop-min, which is then by default 0.14, or 0.4 for dino with a ViT."""
    local_size: Annotated[int, Range(ge=8)] | None = None
    """Side of the small views in pixels (default: about 3/7 of --image-size, 96 at 224)."""


class MaskedConfig(MethodConfig):
    """A ViT that encodes only the patches that are not masked, and a decoder that predicts the others."""

    masks_patches = True
    takes = ("seed",)
    mask_ratio: Annotated[float, Range(gt=0, lt=1)] = 0.75
    """Share of the patches that are masked."""
    decoder_layers: Count = 8
    """Transformer blocks of the decoder."""
    normalize_pixels: bool = True
    """Predict pixels that are normalized by the mean and deviation of their patch (no effect with a tokenizer)."""


# The methods.


class SoftNeighborConfig(MethodConfig):
    """Settings of `SoftNeighborLoss`; the defaults follow the paper's text."""

    temperature: Positive = 0.2
    """Temperature τ of the loss."""
    times_2tau: bool = False
    """Multiply the loss by 2τ, as MoCo v3 and SNCLR's released code do."""
    neighbors: Count = 30
    """Soft neighbors K of each image."""
    gamma: Positive | Literal["max", "pull"] = 1.0
    """Divisor of the attention weights: a number; max: each image's largest weight, so that its largest w is 1; pull:
    1, or less for a neighbor that the image would be pushed away from."""
    loss_form: LossForm = "inside"
    """Weights inside the logarithm (paper) or outside (released code)."""
    sides: Sides = "both"
    """Where neighbors enter the loss: positives (the image's own neighbors, in numerator and denominator), negatives
    (denominator only), other-negatives (denominator only, without the image's own neighbors), both or neither."""
    negatives: Literal["other-view", "both-views"] = "other-view"
    """Negatives of a view: the other images' target projections of the other view, or of both views as in SimCLR."""
    neighbor_weights: Literal["soft", "hard"] = "soft"
    """Weights w of the neighbors in the loss: soft (their positiveness) or hard (1 for every neighbor)."""
    unique_neighbors: bool = False
    """Find each image at most once among the neighbors of a query, by its newest entry in the queue."""
    attention: Literal["identity", "linear"] = "identity"
    """The projections f1 and f2 of Eq. 4. Linear ones are learned."""
    attention_temperature: Positive = 1.0
    """Divisor of the attention logits; below 1 sharpens the positiveness."""
    attention_gradient: bool = False
    """Let the gradient flow through the positiveness into y1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention == "linear" and not self.attention_gradient:
            raise UserError("attention='linear' learns nothing without a gradient. Set attention_gradient=True.")
        if self.gamma == "pull" and self.loss_form == "outside":
            raise UserError("gamma='pull' needs loss_form='inside'. Give a number, max, or loss_form='inside'.")


class SNCLRConfig(MomentumConfig, QueueConfig, SoftNeighborConfig, PredictorConfig):
    """Soft Neighbors are Positive Supporters in Contrastive Visual Representation Learning (ICLR 2023), Eq. 2."""

    implementation = "snclr.methods.snclr.method:SNCLR"
    final_bias: bool = False
    preset: Literal["paper", "released"] = "paper"
    """Values of the settings in which the paper and the authors' public code differ: paper, or released (the code)."""
    neighbor_free_epochs: NonNegativeInt = 0
    """First epochs, trained without neighbors (Eq. 1)."""
    push: Literal["one", "both"] = "one"
    """Views whose target projections are pushed into the queue: one (view 2) or both."""
    search_view: Literal["augmented", "plain"] = "augmented"
    """View whose features are searched and pushed: augmented, or plain: the center crop without color changes, in one
    more pass of the target network."""
    search_space: Literal["projection", "encoder"] = "projection"
    """Features that the search compares: target projections (the paper), or encoder features of the target network."""
    agreeing_neighbors: bool = False
    """Use only those of the K neighbors whose image is also among the K neighbors of the other view."""
    min_agreement: Annotated[float, Range(ge=0, le=1)] = 0.0
    """Use neighbors in an epoch only if, in the epoch before, at least this share of the 10 nearest was found from both
    views of an image; 0: always. No effect with --search-view plain, which has one search."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.search_view == "plain" and self.agreeing_neighbors:
            raise UserError("agreeing_neighbors needs the neighbors of two views; with search_view 'plain' unset it")
        if self.search_view == "plain" and self.push == "both":
            raise UserError("push 'both' is for search_view 'augmented'; with search_view 'plain' set push=one")


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "released": {
        "loss_form": "outside", "attention_gradient": True, "times_2tau": True, "projector_layers": 3, "final_bn": True,
        "predictor_final_bn": True, "momentum_schedule": "cosine",
    },
}  # fmt: skip
"""The settings behind each value of `SNCLRConfig.preset`."""


class SimCLRConfig(FinalNormConfig):
    """A Simple Framework for Contrastive Learning of Visual Representations (ICML 2020), Eq. 1."""

    implementation = "snclr.methods.simclr:SimCLR"
    hidden: Count = 2048
    dim: AtLeastTwo = 128
    final_bn: bool = True
    final_scale: bool = True
    """Give the final batch norm of the projector a learned scale; it has no shift."""
    temperature: Positive = 0.1


class QueueContrastConfig(MomentumConfig, QueueConfig, ProjectorConfig):
    """MoCo v2's values of the settings that it shares with DetCo."""

    hidden: Count = 2048
    dim: AtLeastTwo = 128
    temperature: Positive = 0.2
    queue_length: Count = 65_536
    momentum: Momentum = 0.999


class MoCoV2Config(QueueContrastConfig):
    """Improved Baselines with Momentum Contrastive Learning (2020), Eq. 1."""

    implementation = "snclr.methods.mocov2:MoCoV2"
    symmetric: bool = False
    """Add the loss of the other direction, view 2 to view 1, and push the keys of both views."""


class MoCoConfig(MoCoV2Config):
    """Momentum Contrast for Unsupervised Visual Representation Learning (CVPR 2020), Eq. 1."""

    projector_layers: Count = 1
    temperature: Positive = 0.07


class MoCoV3Config(MomentumConfig, PredictorConfig):
    """An Empirical Study of Training Self-Supervised Vision Transformers (ICCV 2021), Eq. 1 and Algorithm 1."""

    implementation = "snclr.methods.mocov3:MoCoV3"
    final_bn: bool = True
    final_bias: bool = False
    temperature: Positive = 1.0
    times_2tau: bool = True
    momentum_schedule: MomentumSchedule = "cosine"


class BYOLConfig(MomentumConfig, PredictorConfig):
    """Bootstrap Your Own Latent (NeurIPS 2020), Eq. 2."""

    implementation = "snclr.methods.byol:BYOL"
    final_bias: bool = False
    momentum: Momentum = 0.996
    momentum_schedule: MomentumSchedule = "cosine"


class SimSiamConfig(PredictorConfig):
    """Exploring Simple Siamese Representation Learning (CVPR 2021), Eq. 4."""

    implementation = "snclr.methods.simsiam:SimSiam"
    hidden: Count = 2048
    dim: AtLeastTwo = 2048
    projector_layers: Count = 3
    final_bn: bool = True
    fix_predictor_lr: bool = True
    """Keep the learning rate of the predictor at its peak during the whole training."""


class NNCLRConfig(QueueConfig, PredictorConfig):
    """With a Little Help from My Friends: Nearest-Neighbor Contrastive Learning (ICCV 2021), Eq. 3."""

    implementation = "snclr.methods.nnclr:NNCLR"
    hidden: Count = 2048
    projector_layers: Count = 3
    final_bn: bool = True
    temperature: Positive = 0.1
    queue_length: Count = 98_304


class SwAVConfig(MultiCropConfig, PrototypeConfig, FinalNormConfig):
    """Unsupervised Learning of Visual Features by Contrasting Cluster Assignments (NeurIPS 2020), Eq. 1 to 3."""

    implementation = "snclr.methods.swav:SwAV"
    hidden: Count = 2048
    dim: AtLeastTwo = 128
    temperature: Positive = 0.1
    prototypes: AtLeastTwo = 3000
    assignment_queue: NonNegativeInt | None = None
    """Earlier features of each view that are assigned to the prototypes with the batch, a multiple of the
    batch size (default: none if the batch has as many images as there are prototypes, else enough for batch and queue
    to have 4/3 as many)."""
    assignment_queue_start: NonNegativeInt = 15
    """Epochs before the first features enter that queue."""


class BarlowTwinsConfig(FinalNormConfig):
    """Barlow Twins: Self-Supervised Learning via Redundancy Reduction (ICML 2021), Eq. 1."""

    implementation = "snclr.methods.barlowtwins:BarlowTwins"
    hidden: Count = 8192
    dim: AtLeastTwo = 8192
    projector_layers: Count = 3
    final_bias: bool = False
    redundancy_weight: NonNegative | Literal["auto"] = "auto"
    """Weight λ of the redundancy term; auto: 0.0051 × 8192 / dim, so that both terms keep their ratio."""


class DINOConfig(MomentumConfig, MultiCropConfig, PrototypeConfig, ProjectorConfig):
    """Emerging Properties in Self-Supervised Vision Transformers (ICCV 2021), Eq. 3 and 4."""

    implementation = "snclr.methods.dino:DINO"
    hidden: Count = 2048
    projector_layers: Count = 3
    temperature: Positive = 0.1
    prototypes: AtLeastTwo = 65_536
    momentum: Momentum = 0.996
    momentum_schedule: MomentumSchedule = "cosine"
    teacher_temperature: Positive = 0.07
    """Temperature of the teacher after its warm-up, which starts at 0.04."""
    teacher_warmup_epochs: NonNegativeInt = 30
    """Epochs of linear warm-up of the teacher's temperature."""
    center_momentum: Annotated[float, Range(ge=0, le=1)] = 0.9
    """EMA momentum of the teacher's center."""
    norm_last_layer: bool = True
    """Keep the scale of each prototype at 1; no: learn it, which the authors do for ViT-S."""
    exported: Literal["teacher", "student"] = "teacher"
    """Network whose encoder is saved and evaluated: the EMA teacher, as in the paper, or the student."""


class MAEConfig(MaskedConfig):
    """Masked Autoencoders Are Scalable Vision Learners (CVPR 2022), Section 3."""

    implementation = "snclr.methods.masked.mae:MAE"
    decoder_dim: Count = 512
    """Width of the decoder, a multiple of 4 and of its heads."""
    decoder_heads: Count = 16
    """Attention heads of the decoder."""


class CAEConfig(MaskedConfig):
    """Context Autoencoder for Self-Supervised Representation Learning (IJCV 2023), Eq. 1."""

    implementation = "snclr.methods.masked.cae:CAE"
    mask_ratio: Annotated[float, Range(gt=0, lt=1)] = 0.5
    decoder_layers: Count = 4
    regressor_layers: Count = 4
    """Cross-attention blocks of the regressor, which predicts the features of the masked patches."""
    alignment_weight: NonNegative = 2.0
    """Weight of the alignment loss: predicted features against the encoder's own of the masked patches."""
    tokenizer: str | None = None
    """Predict tokens instead of pixels: a safetensors file with a codebook of patches (page All methods)."""


class PIRLConfig(ProjectorConfig):
    """Self-Supervised Learning of Pretext-Invariant Representations (CVPR 2020), Eq. 5."""

    implementation = "snclr.methods.jigsaw.pirl:PIRL"
    takes = ("images", "seed")
    hidden: Count = 2048
    dim: AtLeastTwo = 128
    projector_layers: Count = 1
    temperature: Positive = 0.07
    jigsaw_weight: Annotated[float, Range(ge=0, le=1)] = 0.5
    """Weight λ of the loss of the patches; that of the image has 1 − λ."""
    bank_negatives: Count = 32_000
    """Entries of the memory bank that are negatives of a step; all of them if the bank has no more."""
    bank_momentum: Annotated[float, Range(ge=0, le=1)] = 0.5
    """Weight of an image's entry in the memory bank when its new feature is averaged into it."""


class DetCoConfig(QueueContrastConfig):
    """DetCo: Unsupervised Contrastive Learning for Object Detection (ICCV 2021), Section 3."""

    implementation = "snclr.methods.jigsaw.detco:DetCo"
    takes = ("seed",)


class SupervisedConfig(MethodConfig):
    """Cross-entropy on labels with a linear classifier; a reference for the self-supervised methods."""

    implementation = "snclr.methods.supervised:Supervised"
    needs_labels = True
    takes = ("classes",)


METHODS: dict[str, type[MethodConfig]] = {
    "snclr": SNCLRConfig,
    "simclr": SimCLRConfig,
    "moco": MoCoConfig,
    "mocov2": MoCoV2Config,
    "mocov3": MoCoV3Config,
    "byol": BYOLConfig,
    "simsiam": SimSiamConfig,
    "nnclr": NNCLRConfig,
    "swav": SwAVConfig,
    "barlowtwins": BarlowTwinsConfig,
    "dino": DINOConfig,
    "mae": MAEConfig,
    "cae": CAEConfig,
    "pirl": PIRLConfig,
    "detco": DetCoConfig,
    "supervised": SupervisedConfig,
}

METHOD_SETTINGS: frozenset[str] = frozenset().union(*(config.setting_names() for config in METHODS.values()))
"""Names of all settings that belong to a method."""
