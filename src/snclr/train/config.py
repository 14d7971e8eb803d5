"""Settings of a pre-training run: `PretrainConfig` and `resolve`, which makes one from recipe, file and flags.

Setting names are the same in Python, on the command line and in `config.yaml`. The settings of the run are declared
here, those of the method in `snclr.methods.config`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from snclr.errors import UserError, did_you_mean, first_line, known_spelling, similar_path
from snclr.methods.config import METHOD_SETTINGS, METHODS, PRESETS, MethodConfig, MethodName, QueueConfig, SNCLRConfig
from snclr.methods.paper_settings import Setup, paper_settings
from snclr.recipes import RECIPES, get_recipe
from snclr.runtime.memory import image_cache_bytes
from snclr.runtime.settings import (
    Count,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    Range,
    Setting,
    Settings,
    check_devices,
    check_fields,
    current_name,
    describe,
)


class MainConfig(Settings):
    """What is trained on which images, and where the result is written."""

    data: str = ""
    """Images: a folder (any depth), a list file, shards ({000..146}.tar, local or at an https:// or s3:// address),
    hf:OWNER/NAME, the name of a built-in dataset, or demo."""
    out: str = ""
    """Run directory: checkpoints, metrics and the trained encoder are written there."""
    recipe: str = "photos"
    """Named settings to start from; `snclr recipes` lists them."""
    method: MethodName = "snclr"
    """Training method; `snclr methods` lists them with their settings."""
    seed: Annotated[int, Range(ge=0, lt=2**32)] = 0
    """Seed of weights, image order and augmentations."""
    init_from: str | None = None
    """Start from the encoder of another run, from a torchvision, timm or MoCo v3 weights file, or from `pretrained`:
    the weights that the encoder's library publishes (downloaded)."""
    resume: bool = False
    """Continue the run in --out from its last checkpoint."""
    overwrite: bool = False
    """Delete the run in --out and start again."""


class EncoderConfig(Settings):
    """The encoder."""

    encoder: str = "resnet18"
    """A torchvision ResNet or any timm model; `snclr encoders` lists them."""
    image_size: Annotated[int, Range(ge=8)] = 128
    """Side of the square views in pixels."""
    stem: Literal["auto", "standard", "small", "half"] = "auto"
    """First layers of a ResNet: standard (7×7, pooled), small (3×3), half (3×3, stride 2), or auto: small up to 64
    pixels, else standard. On the same images, small computes about 15 times as much as standard, half 4 times."""
    heads: Count | None = None
    """Attention heads of a ViT (default: the model's own)."""
    sincos: bool = False
    """Use fixed 2-D sine-cosine position embeddings in a ViT."""
    freeze_patch_embed: bool = False
    """Keep the patch embedding of a ViT at its random initialization."""
    zero_init_residual: bool = True
    """Start every residual branch of a ResNet at zero; no: torchvision's initialization. timm's ResNets always start at
    zero."""
    drop_path: Annotated[float, Range(ge=0, lt=1)] = 0.0
    """Probability to skip a block of a ViT in training: rises linearly from 0 in the first block to this value in the
    last. A target network skips none."""


class ViewConfig(Settings):
    """Augmentation of the two views."""

    views: Literal[
        "byol", "cifar", "simclr", "simclr-cifar", "moco", "mocov2", "pirl", "infomin", "randaugment", "crops"
    ] = "byol"  # fmt: skip
    """Augmentations of the two views: byol (the paper), cifar (no blur, larger crops), simclr (stronger colors),
    simclr-cifar (half as strong, no blur), moco, mocov2 and pirl (those of these methods), infomin (stronger colors and
    RandAugment, as in InfoMin's code), randaugment (the same with torchvision's strengths) or crops (random crops and
    flips only)."""
    crop_min: Fraction | None = None
    """Smallest area of a random crop, as a fraction of the image; overrides that of --views."""


class OptimConfig(Settings):
    """Optimization."""

    epochs: Count = 100
    """Passes over the images."""
    batch_size: Annotated[int, Range(ge=2)] = 128
    """Images per step, over all ranks."""
    optimizer: Literal["lars", "adamw", "sgd"] = "adamw"
    """Optimizer; lars and sgd have momentum 0.9."""
    lr: NonNegative = 1e-3
    """Base learning rate; the peak is lr × batch size / 256."""
    warmup_epochs: NonNegative = 10.0
    """Epochs of linear warm-up before the cosine decay (default: the recipe's, but at most a tenth of --epochs in a run
    that is shorter than the recipe)."""
    weight_decay: NonNegative = 1e-4
    """Weight decay of the parameters that --weight-decay-on names."""
    weight_decay_end: NonNegative | None = None
    """Weight decay at the end of the training, reached along a cosine (default: constant)."""
    weight_decay_on: Literal["weights", "all"] = "weights"
    """Parameters with weight decay: weights (no biases, norms and tokens) or all; lars never decays 1-D tensors."""
    beta2: Annotated[float, Range(ge=0, lt=1)] = 0.999
    """Decay rate β2 of the second moment of adamw."""
    clip_gradient: Positive | None = None
    """Clip the gradient to this norm (default: no clipping)."""


class HardwareConfig(Settings):
    """Hardware."""

    device: str = "auto"
    """Device: cpu, cuda, mps, cuda:1 for the second GPU, or auto: a GPU if there is one."""
    devices: str = "1"
    """Ranks per node, each on its own device: a number, or auto for all GPUs."""
    nodes: Count = 1
    """Number of nodes."""
    precision: Literal["32", "bf16", "16", "64", "bf16-mixed", "16-mixed"] = "32"
    """Floating-point precision of encoders and heads; bf16 and 16 (also called bf16-mixed and 16-mixed) need a GPU.
    Weights, norms and losses stay in 32 bits."""
    tf32: bool = True
    """Multiply and convolve 32-bit numbers with 10 bits of mantissa (TF32) on NVIDIA GPUs that support it: up to eight
    times faster by the data sheets. No: with all 23 bits."""
    deterministic: bool = False
    """Use algorithms that give the same bits in every run on a GPU; steps take longer, by an estimated tenth to a
    third. On a CPU, runs give the same bits without it."""
    activation_checkpointing: bool = False
    """Keep only the input of each block of the encoder, and recompute its activations in the backward pass: less
    memory, the same gradients, about a third more time (estimate: a second forward pass)."""
    micro_batch: NonNegativeInt = 0
    """Images per rank that pass through the encoder at once, with the gradient of the whole batch (0: all). Every image
    passes twice, as with --activation-checkpointing. For encoders without batch norm, such as ViTs."""
    compile: bool = False
    """Compile encoders, heads and, for snclr, byol, moco, mocov2 and mocov3, the loss with torch.compile."""
    workers: NonNegativeInt = 2
    """Dataloader worker processes per rank."""
    cache_images: str = "auto"
    """Keep decoded images in memory if all of them fit into this size per machine, e.g. 4GB; auto: a quarter of the
    free memory, at most 2 GB; never: decode them every epoch."""
    threads: NonNegativeInt = 0
    """CPU threads per rank (0: one per core); small encoders do not gain from many."""
    timeout: Annotated[float, Range(ge=5)] = 600.0
    """Seconds to wait for a rank that does not respond before the run fails."""


class OutputConfig(Settings):
    """Checkpoints and logs."""

    checkpoint_every: NonNegativeInt = 0
    """Steps between checkpoints (0: once per epoch)."""
    keep_checkpoints: Count = 2
    """Number of checkpoints to keep."""
    keep_encoders: NonNegativeInt = 0
    """Encoder snapshots to keep, spread evenly over training, for the time axis of snclr explore."""
    log_every: Count = 10
    """Steps between records in metrics.jsonl."""
    max_bad_share: Annotated[float, Range(ge=0, le=1)] = 0.1
    """Stop if more than this fraction of the images cannot be read."""


class PretrainConfig(OutputConfig, HardwareConfig, OptimConfig, ViewConfig, EncoderConfig, MainConfig):
    """All settings of a run: those of the run itself and, in `method_config`, those of its method.

    `config.neighbors` is short for `config.method_config.neighbors`.
    """

    method_config: MethodConfig
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """Names of the settings that do not come from the recipe or the method's defaults."""

    def __post_init__(self) -> None:
        for part in PretrainConfig.__bases__:
            check_fields(self, part)
        object.__setattr__(self, "precision", self.precision.removesuffix("-mixed"))  # one name for what is the same
        if self.warmup_epochs >= self.epochs and self.warmup_epochs > 0:
            raise UserError(
                f"warmup_epochs={self.warmup_epochs:g} must be below epochs={self.epochs}. Lower the first or raise the"
                " second."
            )
        check_devices(self.devices)
        if self.compile and (self.micro_batch or self.activation_checkpointing):
            raise UserError(
                "compile excludes micro_batch and activation_checkpointing: torch.compile decides what is computed"
                " twice. Omit one of them."
            )
        queue = getattr(self.method_config, "assignment_queue", None) or 0
        if queue % self.batch_size:
            raise UserError(
                f"assignment_queue={queue} must be a multiple of batch_size={self.batch_size}: whole batches enter and"
                f" leave it. Use {queue // self.batch_size * self.batch_size or self.batch_size}."
            )
        image_cache_bytes(self.cache_images)
        if self.resume and self.overwrite:
            raise UserError("resume=True and overwrite=True exclude each other. Give one of them.")

    def __getattr__(self, name: str) -> Any:
        if name in METHOD_SETTINGS:
            return getattr(self.method_config, name)
        raise AttributeError(f"PretrainConfig has no setting {name!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return all settings under their flat names, as plain values for YAML or JSON."""
        values = dataclasses.asdict(self)
        del values["given"]
        return values | values.pop("method_config")


MAY_CHANGE_ON_RESUME = frozenset(
    {f.name for part in (HardwareConfig, OutputConfig) for f in fields(part)} - {"precision"}
    | {"data", "out", "init_from", "resume", "overwrite"}
)
"""Settings that may differ when a run is resumed: where and how it runs, not what it computes.

The images may have moved, so `data` may differ; their fingerprint must not.
"""

SIZES = frozenset({"hidden", "dim", "queue_length", "momentum", "prototypes"})
"""The method settings that depend on the size of the dataset. A recipe of scale "small" sets them for every method."""

REMOVED_SETTINGS = {"accumulate": 1}
"""Settings of earlier versions with the only value they could have; a config.yaml may still contain them."""

EARLIER_VALUES: dict[str, Any] = {
    "final_bias": True, "zero_init_residual": False, "weight_decay_on": "weights", "final_scale": False,
    "assignment_queue": 0, "fix_predictor_lr": False, "exported": "student", "min_agreement": 0.0,
}  # fmt: skip
"""Settings that earlier versions did not have, with the value that describes what those versions did."""


@functools.cache
def setting_groups() -> dict[str, dict[str, Setting]]:
    """Return the settings of all runs and methods, by group title and name.

    The default of a method setting is that of the first class that declares it: a shared group, else a method.
    """
    method_settings: dict[str, Setting] = {}
    bases: list[Any] = [base for config in METHODS.values() for base in reversed(config.__mro__)]
    for base in bases:
        for name, setting in describe(base).items() if issubclass(base, MethodConfig) else ():
            method_settings.setdefault(name, setting)
    return {
        "Main options": describe(MainConfig),
        "Encoder": describe(EncoderConfig),
        "Augmentation": describe(ViewConfig),
        "Optimization": describe(OptimConfig),
        "Method settings": method_settings,
        "Hardware": describe(HardwareConfig),
        "Checkpoints and logs": describe(OutputConfig),
    }


def all_settings() -> dict[str, Setting]:
    """Return the settings of all runs and methods by name.

    >>> all_settings()["neighbors"].default
    30
    """
    return {name: setting for group in setting_groups().values() for name, setting in group.items()}


def config_value(name: str, value: Any) -> Any:
    """Return the value that a config has for a given one; raise UserError if it is not allowed.

    >>> config_value("recipe", "CIFAR"), config_value("precision", "bf16-mixed"), config_value("method", "MoCo-v3")
    ('cifar', 'bf16', 'mocov3')
    """
    checked = all_settings()[name].check(value)
    if name == "recipe":
        return known_spelling(checked, RECIPES)
    return checked.removesuffix("-mixed") if name == "precision" else checked


def resolve(settings: Mapping[str, Any], config: str | Path | None = None) -> PretrainConfig:
    """Return the config of a run: `settings` win over the file `config`, the file over the recipe.

    A recipe is written for SNCLR. Another method takes the recipe's run settings, but its method settings from its own
    paper, except that a recipe of scale "small" also sets `SIZES`; see `paper_settings` for those that depend on the
    run. In a run with fewer epochs than its recipe, a warm-up that is not given is at most a tenth of the epochs.

    >>> config = resolve({"recipe": "cifar", "epochs": 7})
    >>> config.epochs, config.warmup_epochs
    (7, 0.7)
    >>> resolve({"recipe": "cifar", "method": "simclr"}).temperature  # as in its authors' command for CIFAR-10
    0.5
    """
    known = all_settings()
    given = _check_names(settings)
    read = {} if config is None else read_config(Path(config))
    saved = _check_names(read)
    saved = {name: value for name, value in saved.items() if name not in ("out", "resume", "overwrite")}
    recipe_name = known_spelling(str((saved | given).get("recipe", "photos")), RECIPES)
    recipe = get_recipe(recipe_name)
    method = known["method"].check((saved | given).get("method", "snclr"))
    if saved.get("method", "snclr") == method:  # else the file is for another method
        _check_used(method, saved)
    _check_used(method, given)

    values = dict(recipe.settings)
    # The config.yaml of a run comes as the file or as `settings` (on a resume, and when a run is loaded). It has all
    # settings, those of `paper_settings` included; a None in it replaces the value of the recipe.
    of_run = settings if is_run_config(settings) else read if is_run_config(read) and read["method"] == method else {}
    if method != "snclr":
        replaced = METHOD_SETTINGS - (SIZES if recipe.scale == "small" else set())
        values = {name: value for name, value in values.items() if name not in replaced}
        if not of_run:
            values |= paper_settings(
                method, _setup(method, values | saved | given, paper_scale=recipe.scale == "paper")
            )
    for name, value in _with_current_names(of_run).items():
        if value is None and type(None) in known[name].types:
            values[name] = None
    for source in (saved, given):
        values |= PRESETS[known["preset"].check(source.get("preset", "paper"))] | source
    if "warmup_epochs" not in given and ("warmup_epochs" not in saved or "epochs" in given):
        epochs, warmup = (known[name].check(values[name]) for name in ("epochs", "warmup_epochs"))
        warmup_source = saved if {"epochs", "warmup_epochs"} <= saved.keys() else recipe.settings
        is_shorter = epochs < known["epochs"].check(warmup_source["epochs"])
        values["warmup_epochs"] = min(warmup, epochs / 10) if is_shorter else warmup
    values |= {"recipe": recipe_name, "method": method}

    names = METHODS[method].setting_names()
    method_config = METHODS[method](**{name: value for name, value in values.items() if name in names})
    run_settings = {name: value for name, value in values.items() if name not in METHOD_SETTINGS}
    return PretrainConfig(**run_settings, method_config=method_config, given=frozenset(saved | given))


def require_paths(config: PretrainConfig) -> None:
    """Raise UserError if the images or the run directory are not given."""
    for name in ("data", "out"):
        if not getattr(config, name):
            raise UserError(f"{name} is missing. Give the images (--data) and the run directory (--out).")


def _setup(method: str, values: Mapping[str, Any], *, paper_scale: bool) -> Setup:
    """Return the settings on which the values of a method's paper depend, with the method's own defaults."""
    method_class: Any = METHODS[method]
    known = all_settings() | describe(method_class)
    names = [field.name for field in fields(Setup) if field.name != "paper_scale"]
    checked = {name: known[name].check(values[name]) if name in values else known[name].default for name in names}
    return Setup(**checked, paper_scale=paper_scale)


def fit_queue(config: PretrainConfig, images: int) -> PretrainConfig:
    """Shorten a queue whose length was not given to the number of images. Raise UserError for too many neighbors.

    A longer queue holds several features of an image, which can then be selected as a neighbor more than once.
    """
    method = config.method_config
    if isinstance(method, QueueConfig) and "queue_length" not in config.given and method.queue_length > images:
        method = replace(method, queue_length=images)
    if isinstance(method, SNCLRConfig) and method.sides != "neither":
        if method.neighbors >= images:
            raise UserError(
                f"neighbors={method.neighbors} must be below the number of images, {images:,}. Lower it or add images."
            )
        if method.neighbors > method.queue_length:
            raise UserError(
                f"neighbors={method.neighbors} must be at most queue_length={method.queue_length}: neighbors are"
                " selected from the queue. Change one of them."
            )
    return replace(config, method_config=method)


def read_config(path: Path) -> dict[str, Any]:
    """Return the settings in a config.yaml; the file of a run of an earlier version gets `EARLIER_VALUES`."""
    import yaml

    if not path.exists():
        raise UserError(f"there is no settings file {path}{similar_path(path)}. Give the config.yaml of a run.")
    of_run = path.name == "config.yaml"
    advice = "Restore it or start a new run." if of_run else "Give the config.yaml of a run."
    try:
        saved = yaml.safe_load(path.read_text())
        if not isinstance(saved, dict):
            raise ValueError("it has no settings")
    # The safe loader also raises the errors of its constructors, e.g. for a date or for deep nesting.
    except (yaml.YAMLError, OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is not a settings file ({first_line(error)}). {advice}") from error
    saved = _with_current_names(saved)
    if not is_run_config(saved) or saved["method"] not in list(METHODS):
        return saved
    # Before there was `predictor_final_bn`, `final_bn` was for both heads. Before there was `drop_path`, the views
    # "infomin" were those that are now named "randaugment".
    added = {**EARLIER_VALUES, "predictor_final_bn": saved.get("final_bn", False)}
    renamed = {"views": "randaugment"} if saved.get("views") == "infomin" and "drop_path" not in saved else {}
    return settings_for_method(saved["method"], added) | saved | renamed


def is_run_config(settings: Mapping[str, Any]) -> bool:
    """Whether the settings are the whole config.yaml of a run, of any version; a file written by hand has fewer."""
    names = ("out", "recipe", "method", "seed", "resume", "overwrite", "encoder", "epochs", "batch_size", "optimizer")
    return all(settings.get(name) is not None for name in names)


def settings_for_method(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that the method does not use.

    >>> settings_for_method("byol", {"neighbors": 30, "dim": 256, "epochs": 100})
    {'dim': 256, 'epochs': 100}
    """
    unused = METHOD_SETTINGS - METHODS[method].setting_names()
    return {name: value for name, value in settings.items() if name not in unused}


def _check_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not None; raise UserError for an unknown name."""
    kept = {name: value for name, value in settings.items() if (name, value) not in REMOVED_SETTINGS.items()}
    settings, known = _with_current_names(kept), all_settings()
    for name in settings:
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise UserError(f"there is no setting {name!r}{hint}; `snclr pretrain --help` lists them all")
    return {name: value for name, value in settings.items() if value is not None}


def _with_current_names(settings: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the settings under their present names; a YAML file may have keys that are not text."""
    return {current_name(name) if isinstance(name, str) else name: value for name, value in settings.items()}


def _check_used(method: str, settings: Mapping[str, Any]) -> None:
    """Raise UserError for a setting without effect on this method."""
    unused = [name for name in settings if name not in settings_for_method(method, settings)]
    if unused:
        users = ", ".join(name for name, config in METHODS.items() if unused[0] in config.setting_names())
        given = " or ".join(f"{name}={settings[name]!r}" for name in unused)
        raise UserError(
            f"method={method} does not use {given} (used by {users}). `snclr methods {method}` lists its settings."
        )
