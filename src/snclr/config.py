"""The settings of a pre-training run: one flat, typed, checked list.

The names are the same in Python, on the command line and in `config.yaml`. A recipe fills in values, a method puts its
own paper's before them, a preset fills in SNCLR's open choices, and what a person gives wins.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from snclr.errors import UserError
from snclr.methods import METHOD_SETTINGS, METHODS


def _setting(default: Any, help: str, *, choices: tuple[str, ...] | None = None, low: float | None = None) -> Any:
    """A field with its help text and what it may be; `low` is the least number allowed."""
    return field(default=default, metadata={"help": help, "choices": choices, "low": low})


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """All that decides what a run computes, and where it runs. `resolve` makes one from a recipe and flags."""

    data: str = _setting(
        "",
        "images: a folder at any depth, a list file, shards ({000..146}.tar, here or an https:// or s3:// address), "
        "hf:OWNER/NAME, a built-in set's name, or demo",
    )
    out: str = _setting("", "the run folder to write")
    recipe: str = _setting("photos", "named settings to start from; `snclr recipes` lists them")
    method: str = _setting("snclr", "the method; `snclr methods` lists them and their settings", choices=tuple(METHODS))
    preset: str = _setting(
        "paper",
        "SNCLR's open choices together: the paper's text, or what the authors' public code computes",
        choices=("paper", "released"),
    )

    encoder: str = _setting("resnet18", "a torchvision ResNet or any timm model; `snclr encoders` lists them")
    image_size: int = _setting(128, "side of the square views, in pixels", low=8)
    stem: str = _setting(
        "auto",
        "a ResNet's first layers: standard (7×7, pooled), small (3×3, for images up to 64), half (3×3, stride 2)",
        choices=("auto", "standard", "small", "half"),
    )
    heads: int | None = _setting(None, "attention heads of a ViT (default: the model's own)", low=1)
    sincos: bool = _setting(False, "fixed 2-D sine-cosine positions in a ViT")
    freeze_patch_embed: bool = _setting(False, "keep a ViT's patch embedding at its random start")
    hidden: int = _setting(4096, "hidden units of projector and predictor", low=1)
    dim: int = _setting(256, "features (D) that the loss compares", low=2)
    projector_layers: int = _setting(2, "linear layers of the projector", low=1)
    predictor_layers: int = _setting(2, "linear layers of the predictor", low=1)
    final_bn: bool = _setting(False, "end projector and predictor with a batch norm")

    batch_size: int = _setting(128, "images in a step, over all processes", low=2)
    epochs: int = _setting(100, "passes over the data", low=1)
    optimizer: str = _setting("adamw", "the optimiser", choices=("lars", "adamw", "sgd"))
    lr: float = _setting(1e-3, "base learning rate: the peak is lr × batch size / 256", low=0)
    weight_decay: float = _setting(1e-4, "weight decay; biases, norms and tokens are spared", low=0)
    warmup_epochs: float = _setting(10, "epochs of linear warm-up before the cosine", low=0)
    clip_gradient: float | None = _setting(None, "largest gradient norm", low=0)
    accumulate: int = _setting(1, "must be 1: a contrastive batch is not a sum of smaller ones", low=1)

    temperature: float = _setting(0.2, "temperature τ of the loss")
    neighbors: int = _setting(30, "soft neighbours K of each image", low=1)
    queue_length: int = _setting(128_000, "features Q that the neighbours are searched in", low=1)
    gamma: float | str = _setting(1.0, "divides the positiveness: a number, or max (the nearest has w = 1)")
    loss_form: str = _setting(
        "inside", "weights inside the logarithm (the paper) or outside", choices=("inside", "outside")
    )
    sides: str = _setting("both", "where neighbours enter", choices=("both", "positives", "negatives", "neither"))
    weights: str = _setting(
        "soft", "soft positiveness, or hard: every neighbour fully positive", choices=("soft", "hard")
    )
    attention: str = _setting("identity", "f1 and f2 of the attention", choices=("identity", "linear"))
    attention_temperature: float = _setting(1.0, "divides the attention logits")
    attention_gradient: bool = _setting(False, "let the gradient flow through the positiveness")
    times_2tau: bool = _setting(False, "multiply the loss by 2τ")
    neighbor_free_epochs: int = _setting(0, "the first m epochs use no neighbours (Eq. 1)", low=0)
    push: str = _setting("one", "keys that enter the queue: of one view or of both", choices=("one", "both"))
    queue_dtype: str = _setting("float32", "how the queue stores features", choices=("float32", "float16", "bfloat16"))
    momentum: float = _setting(0.99, "momentum of the second encoder", low=0)
    momentum_schedule: str = _setting("constant", "constant, or a cosine up to 1", choices=("constant", "cosine"))
    prototypes: int = _setting(512, "directions that features are assigned to (swav, dino)", low=2)
    freeze_prototypes_epochs: int = _setting(1, "epochs for which the prototypes stay as they start", low=0)
    teacher_temperature: float = _setting(0.07, "temperature of dino's teacher; its warm-up starts at 0.04")
    teacher_warmup_epochs: int = _setting(30, "epochs of linear warm-up of the teacher's temperature", low=0)
    center_momentum: float = _setting(0.9, "momentum of the centre of dino's teacher", low=0)
    redundancy_weight: float = _setting(0.005, "weight λ of barlowtwins' redundancy term", low=0)

    views: str = _setting("byol", "the two augmentation groups", choices=("byol", "cifar", "infomin", "crops"))
    crop_min: float | None = _setting(None, "smallest share of the image's area in a crop", low=0)

    seed: int = _setting(0, "all randomness follows from it", low=0)
    workers: int = _setting(2, "processes that decode images", low=0)
    precision: str = _setting("32", "numbers the encoders compute with", choices=("32", "bf16", "16", "64"))
    accelerator: str = _setting("auto", "what to run on", choices=("auto", "cpu", "cuda", "mps"))
    devices: str = _setting("1", "processes on this machine (a number, or auto: all GPUs)")
    nodes: int = _setting(1, "machines", low=1)
    timeout: float = _setting(600.0, "seconds after which a silent process ends the run, on all of them", low=5)
    threads: int = _setting(
        0, "threads of a process on the CPU (0: one a core); small encoders gain nothing by more", low=0
    )
    compile: bool = _setting(False, "compile the encoders with torch.compile")

    resume: bool = _setting(False, "go on with the run in --out")
    overwrite: bool = _setting(False, "delete the run in --out and start anew")
    init_from: str | None = _setting(None, "start from another run's weights, or a torchvision, timm or MoCo v3 file")
    checkpoint_every: int = _setting(0, "steps between checkpoints (0: once an epoch)", low=0)
    keep_checkpoints: int = _setting(2, "how many checkpoints to keep", low=1)
    log_every: int = _setting(10, "steps between lines of metrics.jsonl", low=1)
    max_bad_share: float = _setting(0.1, "stop when more than this share of the images cannot be read", low=0)

    def __post_init__(self) -> None:
        """Check types, ranges and choices field by field, then what only fails together."""
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, _checked(f, getattr(self, f.name)))
        if self.accumulate != 1:
            raise UserError(
                f"accumulate={self.accumulate}: the loss compares every image with the whole batch, so smaller batches"
                " cannot be summed to a larger one. Use more devices, a smaller image size or encoder, or a smaller"
                " batch with a longer queue (--queue-length), which gives negatives at little cost."
            )
        if self.clip_gradient == 0:
            raise UserError(
                "clip_gradient must be above 0: 0 would clip every gradient away; leave it out to clip none"
            )
        if self.seed >= 2**32:
            raise UserError(f"seed must be below 2**32 ({2**32:,}), not {self.seed:,}")
        if not 0 < self.momentum <= 1:
            raise UserError(f"momentum must lie in (0, 1], not {self.momentum}")
        for name in ("temperature", "attention_temperature", "teacher_temperature"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.center_momentum > 1:
            raise UserError(f"center_momentum must lie in [0, 1], not {self.center_momentum}")
        if self.crop_min is not None and not 0 < self.crop_min <= 1:
            raise UserError(f"crop_min is a share of the area, in (0, 1], not {self.crop_min}")
        if self.warmup_epochs >= self.epochs and self.warmup_epochs > 0:
            raise UserError(
                f"warmup_epochs={self.warmup_epochs:g} leaves nothing of epochs={self.epochs}: give fewer of them"
            )
        if self.devices != "auto" and not (self.devices.isdigit() and int(self.devices) >= 1):
            raise UserError(f"devices must be a number from 1 on, or auto, not {self.devices!r}")
        if self.resume and self.overwrite:
            raise UserError("resume and overwrite were both given: go on with the run, or start it anew?")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for YAML or JSON; settings that the method does not use are left out."""
        ignored = METHOD_SETTINGS - METHODS[self.method].settings
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in ignored}


# What may differ between a run and its continuation: where and how it runs, not what it computes.
MAY_CHANGE_ON_RESUME = frozenset(
    {
        *("out", "resume", "overwrite", "init_from", "workers", "accelerator", "devices", "nodes"),
        *(
            "timeout",
            "threads",
            "compile",
            "checkpoint_every",
            "keep_checkpoints",
            "log_every",
            "max_bad_share",
            "data",
        ),
    }
)  # data: the same images may have moved; their fingerprint is compared instead


METHOD_PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "released": {
        "loss_form": "outside",
        "attention_gradient": True,
        "times_2tau": True,
        "projector_layers": 3,
        "final_bn": True,
        "momentum_schedule": "cosine",
    },
}


FULL_HIDDEN = 4096
"""Hidden units of the heads in recipes of the paper's size. There a method has its own paper's sizes too. A recipe for
less data has its own, the same for every method: equal heads for a comparison, and a queue and a momentum that fit."""


def resolve(settings: Mapping[str, Any]) -> PretrainConfig:
    """Recipe, then the method's own paper, then preset, then what was given: the config of a run.

    A setting that is given and that the method does not use is refused. A recipe's warm-up that is as long as the
    epochs given becomes a tenth of them.

    >>> config = resolve({"recipe": "cifar", "epochs": 7})
    >>> config.epochs, config.warmup_epochs
    (7, 0.7)
    >>> resolve({"recipe": "cifar", "method": "simclr"}).temperature  # its paper's
    0.1
    """
    from snclr.recipes import get_recipe

    known = {f.name for f in dataclasses.fields(PretrainConfig)}
    for name in settings:
        if name not in known:
            raise UserError(
                f"there is no setting {name!r}{_near(str(name), known)}; `snclr pretrain --help` lists them all"
            )
    given = {name: value for name, value in settings.items() if value is not None}
    recipe = str(given.get("recipe", "photos"))
    values = dict(get_recipe(recipe).settings)
    method = str(given.get("method", values.get("method", "snclr")))
    if method in METHODS:  # any other is refused below, among the choices
        _refuse_unused(method, given)
        full_size = values.get("hidden", FULL_HIDDEN) >= FULL_HIDDEN
        values = settings_of(method, values) | METHODS[method].defaults
        values |= METHODS[method].full_size if full_size else {}
    preset = str(given.get("preset", values.get("preset", "paper")))
    if preset not in METHOD_PRESETS:
        raise UserError(f"preset must be one of {', '.join(METHOD_PRESETS)}, not {preset!r}")
    values |= {**METHOD_PRESETS[preset], **given, "recipe": recipe, "preset": preset}
    epochs, warmup = values.get("epochs"), values.get("warmup_epochs")
    if "warmup_epochs" not in given and isinstance(epochs, int) and warmup is not None and warmup >= epochs:
        values["warmup_epochs"] = epochs / 10  # a run made shorter than the recipe's warm-up gets a warm-up to match
    return PretrainConfig(**values)


def settings_of(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those that mean nothing to the method: so one set of them can serve several methods.

    >>> settings_of("byol", {"neighbors": 30, "dim": 256, "epochs": 100})
    {'dim': 256, 'epochs': 100}
    """
    ignored = METHOD_SETTINGS - METHODS[method].settings
    return {name: value for name, value in settings.items() if name not in ignored}


def _refuse_unused(method: str, given: Mapping[str, Any]) -> None:
    """A setting that would silently do nothing is a misunderstanding."""
    unused = [name for name in given if name not in settings_of(method, given)]
    if unused:
        own = ", ".join(sorted(METHODS[method].settings)) or "none of its own"
        users = ", ".join(name for name, info in METHODS.items() if unused[0] in info.settings)
        raise UserError(
            f"method {method} does not use {' or '.join(unused)} (used by {users}). Its settings: {own}. Leave the flag"
            " out, or choose another --method."
        )


def _checked(f: dataclasses.Field[Any], value: Any) -> Any:
    """The value as the field's type, or a UserError that says what is allowed."""
    kinds = field_types(f)
    for kind in kinds:
        if kind is type(None) and value is None:
            return None
        if isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
            break
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
            break
    else:
        names = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in kinds)
        raise UserError(f"{f.name} must be {names}, not {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{f.name} must be a finite number, not {value!r}")
    choices, low = f.metadata["choices"], f.metadata["low"]
    if choices is not None and value not in choices:
        raise UserError(f"{f.name} must be one of {', '.join(choices)}, not {value!r}{_near(str(value), choices)}")
    if low is not None and isinstance(value, (int, float)) and not value >= low:
        raise UserError(f"{f.name} must be at least {low:g}, not {value!r}")
    if f.name == "gamma" and not (value == "max" or (isinstance(value, float) and value > 0)):
        raise UserError(f"gamma must be a number above 0 or max, not {value!r}")
    return value


@functools.cache
def _type_hints() -> dict[str, Any]:
    return typing.get_type_hints(PretrainConfig)


def field_types(f: dataclasses.Field[Any]) -> tuple[type, ...]:
    """The types a field takes, e.g. (int, NoneType)."""
    hint = _type_hints()[f.name]
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _near(name: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
