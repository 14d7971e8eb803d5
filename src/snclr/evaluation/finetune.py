"""Evaluate a run by fine-tuning its encoder on few labels, with the semi-supervised protocol of SimCLR.

The defaults are those of Chen et al., 2020, appendix B.5: SGD with Nesterov momentum 0.9, learning rate
0.05 × batch / 256, cosine to 0 without warm-up, no weight decay, random resized crops and flips, 60 epochs on 1 % of
the labels and 30 on more, and a head initialized to zero. Only the batch size differs: 256 instead of 4096.
"""

import os
from collections import OrderedDict
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snclr.data.datasets.base import ImageDataset
from snclr.data.loader import Batch, ViewLoader
from snclr.data.splits import take
from snclr.data.transforms.views import TRAIN_CROP
from snclr.distributed.collectives import check_equal_across_ranks, raise_on_all_ranks, rank_and_size
from snclr.distributed.gradients import GradientAverager
from snclr.distributed.launch import check_batch_size
from snclr.distributed.sync_batch_norm import synchronize_batch_norm
from snclr.errors import UserError, count
from snclr.evaluation.baselines import FeatureClassifier, record_accuracy
from snclr.evaluation.linear import LEARNING_RATES, LR_WITHOUT_GRID, linear_cached
from snclr.evaluation.results import FinetuneResult
from snclr.evaluation.scoring import Score, describe_sets, labeled, shared_classes, top_accuracies, true_ranks
from snclr.evaluation.session import EvalInputs, Session, open_inputs
from snclr.evaluation.state import EvalState, fit_task, on_rank_zero
from snclr.evaluation.subsets import LabeledSubset, choose_subset
from snclr.io.atomic import explain_unwritable, fsync_path, write_atomic
from snclr.io.hashing import weights_digest
from snclr.models.encoders import EncoderSpec, build_encoder
from snclr.train.optim import scaled_lr
from snclr.train.schedule import warmup_cosine
from snclr.train.trainer import LoaderTask, check_finite


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings:
    """Settings that determine a fine-tuning. The learning rates are those of the first step."""

    epochs: int
    batch_size: int
    lr: float
    head_lr: float
    weight_decay: float = 0.0
    momentum: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 2:
            raise UserError(f"batch_size is {self.batch_size}; give at least 2 (batch norm needs two images)")


class Classifier(nn.Sequential):
    """An encoder and a linear head initialized to zero: images (N, 3, S, S) to logits (N, C)."""

    encoder: nn.Module
    head: nn.Linear

    def __init__(self, encoder: nn.Module, num_features: int, num_classes: int) -> None:
        head = nn.Linear(num_features, num_classes)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        super().__init__(OrderedDict(encoder=encoder, head=head))


def build_classifier(
    encoder: nn.Module, spec: EncoderSpec, num_classes: int, *, from_scratch: bool, seed: int
) -> Classifier:
    """Build the network to fine-tune; `from_scratch` replaces the encoder's weights by new ones."""
    if from_scratch:
        torch.manual_seed(seed)
        encoder = build_encoder(spec)
    if spec.frozen_patch_embed:  # frozen in pre-training only
        encoder.get_submodule("patch_embed.proj").requires_grad_(True)
    return Classifier(encoder, spec.num_features, num_classes)


@dataclass
class FinetuneTask(LoaderTask):
    """Fine-tune a classifier on the labeled images of a dataset."""

    model: Classifier
    dataset: ImageDataset
    classes: Tensor
    """(C,) the sorted class numbers of the head's outputs."""
    settings: FinetuneSettings
    image_size: int
    nonfinite: Path
    """Where the images of a step with a non-finite loss are listed."""
    workers: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.model.to(self.device)
        self.model.encoder.to(memory_format=torch.channels_last)
        self.model = self.module = synchronize_batch_norm(self.model).train()
        self._classes = self.classes.to(self.device)
        s = self.settings
        self.rank, self.world_size = rank_and_size()
        self.averager = GradientAverager(self.model) if self.world_size > 1 else None
        groups = [{"params": [p for p in self.model.encoder.parameters() if p.requires_grad], "lr": s.lr}]
        groups.append({"params": list(self.model.head.parameters()), "lr": s.head_lr})
        self.optimizer = torch.optim.SGD(
            groups, lr=s.lr, momentum=s.momentum, nesterov=s.momentum > 0, weight_decay=s.weight_decay
        )
        # Any share of unreadable images is accepted: they are replaced, listed, and counted in the result.
        self.loader = ViewLoader(
            self.dataset, views=(TRAIN_CROP,), image_size=self.image_size, batch_size=s.batch_size, seed=s.seed,
            workers=self.workers, rank=self.rank, world_size=self.world_size, device=self.device, max_bad_share=1.0,
        )  # fmt: skip
        self.steps_per_epoch = self.loader.steps_per_epoch
        self.total_steps = s.epochs * self.steps_per_epoch

    def step(self, batch: Batch, *, log: bool) -> dict[str, Any]:
        """Run one step: learning rates, forward, non-finite check, backward, gradient average, update."""
        s = self.settings
        for group, peak in zip(self.optimizer.param_groups, (s.lr, s.head_lr), strict=True):
            group["lr"] = warmup_cosine(batch.step, total_steps=self.total_steps, warmup_steps=0, peak=peak)
        # Dropout and drop-path use the global generator. Seeding it by step and rank leaves no state to save.
        torch.manual_seed(s.seed * 1_000_003 + batch.step + self.rank * 1_000_000_007)
        assert batch.labels is not None
        target = torch.searchsorted(self._classes, batch.labels)
        loss = F.cross_entropy(self.model(batch.views[0]).float(), target)
        mean_loss, _ = check_finite(
            batch.step, loss, batch.ids, report=self.nonfinite, advice="Give a lower --lr or --head-lr."
        )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.averager is not None:
            self.averager.finish()
        self.optimizer.step()
        return {"loss": float(mean_loss)} if log else {}


def evaluate_finetune(
    session: Session, *, data: str | None, test: str | None, labels: str | Path, from_scratch: bool,
    epochs: int | None, batch_size: int, lr: float, head_lr: float | None, weight_decay: float, seed: int,
    baselines: bool | None = None,
) -> FinetuneResult:  # fmt: skip
    """Fine-tune a run on a subset of the labels, test it, compare it with baselines and record the result.

    A stop saves a checkpoint in the run directory and raises StopRequested; the same call continues.
    """
    inputs = open_inputs(session, data, test, seed=seed)
    with raise_on_all_ranks():  # a list of images may differ between nodes
        subset = choose_subset(inputs.train, inputs.train_labels, labels, seed=seed)
        few = replace(inputs, train=take(inputs.train, subset.index), train_labels=inputs.train_labels[subset.index])
        batch = shared_batch_size(batch_size, len(subset.index))
        if epochs is None:  # below 1.5 %: a list of about 1 % counts as 1 %
            epochs = 60 if subset.share < Fraction(3, 200) else 30
        rates = [scaled_lr(base, max(batch, 1)) for base in (lr, lr if head_lr is None else head_lr)]
        settings = FinetuneSettings(
            epochs=epochs, batch_size=batch, lr=rates[0], head_lr=rates[1], weight_decay=weight_decay, seed=seed
        )
        task, saved = _open_task(session, few, subset, settings, from_scratch=from_scratch)
    check_equal_across_ranks(lambda: subset.sha256, f"images in {labels}")
    with saved:
        list_file = on_rank_zero(lambda: _write_list(session.run, subset, seed, saved.folder))
        weights = "new weights" if from_scratch else f"the weights of {session.run}"
        opening = f"fine-tuning {inputs.spec.name} from {weights} on {subset.description}, {count(epochs, 'epoch')}"
        fit_task(
            task, saved, "checkpoints", description="fine-tuning", stop=session.stop, device=task.device,
            quiet=session.quiet, start_message=f"{opening}, on {session.device}",
        )  # fmt: skip
        score = evaluate_classifier(task.model, task.classes, session, inputs)
        skipped = [*task.loader.skipped, *score.skipped]
        protocol = _protocol(inputs, subset, task, score, len(skipped), from_scratch=from_scratch)
        # The baselines are linear classifiers of cached features, trained on the same labeled images.
        can_choose = int(np.bincount(few.train_labels).max()) > 1
        cached = {"learning_rates": LEARNING_RATES if can_choose else (LR_WITHOUT_GRID,), "seed": seed}
        return record_accuracy(
            FinetuneResult, "finetune-scratch" if from_scratch else "finetune", replace(score, protocol=protocol),
            FeatureClassifier("linear", linear_cached, session, few, cached), baselines=baselines,
            note="linear classifier", settings=asdict(settings), labels=str(labels),
            list=list_file.name, list_sha256=subset.sha256, model_sha256=weights_digest(task.model.state_dict()),
            skipped=[asdict(skip) for skip in skipped],
        )  # fmt: skip


def _open_task(
    session: Session, few: EvalInputs, subset: LabeledSubset, settings: FinetuneSettings, *, from_scratch: bool
) -> tuple[FinetuneTask, EvalState]:
    """Return the training on the labeled images of `few`, and its saved state."""
    test_labels = torch.from_numpy(few.test_labels[few.test_labels >= 0])
    classes = shared_classes(torch.from_numpy(few.train_labels), test_labels)
    identity = {
        "settings": asdict(settings),
        "start": "scratch" if from_scratch else weights_digest(few.encoder.state_dict()),
        "encoder": few.spec.to_dict(),
        "list_sha256": subset.sha256,
        "data": few.train.fingerprint(),
        "classes": classes.tolist(),
    }
    saved = EvalState(session.run, f"finetune-{subset.tag}", identity)
    model = build_classifier(few.encoder, few.spec, len(classes), from_scratch=from_scratch, seed=settings.seed)
    task = FinetuneTask(
        model, few.train, classes, settings, few.spec.image_size, workers=session.workers, device=session.device,
        nonfinite=saved.folder.with_name(f"{saved.folder.name}-nonfinite.json"),
    )  # fmt: skip
    return task, saved


def shared_batch_size(given: int, images: int) -> int:
    """Return the batch size: `given`, or with fewer images the most that the ranks can share equally."""
    world_size = rank_and_size()[1]
    if images >= given:
        check_batch_size(given, world_size)
        return given
    if images < world_size:
        raise UserError(f"{images} labeled images are too few for {world_size} ranks; give --devices 1")
    return images - images % world_size


def evaluate_classifier(model: Classifier, classes: Tensor, session: Session, inputs: EvalInputs) -> Score:
    """Test a classifier of the `classes` (C,) on the center crops of the test images; the score has no protocol yet."""
    tested = replace(session, cache=False).features(
        model, inputs.test, image_size=inputs.spec.image_size, labels=inputs.test_labels, description="test"
    )
    logits, truth, unlabeled = labeled(tested.features, tested.labels, "test")
    ranks = true_ranks(logits, torch.searchsorted(classes, truth))
    accuracies, predictions = top_accuracies(ranks, len(classes)), classes[logits.argmax(dim=1)]
    return Score(*accuracies, "", predictions, truth, unlabeled, skipped=tested.skipped)


def _write_list(run: Path, subset: LabeledSubset, seed: int, work: Path) -> Path:
    """Write the names of the labeled images to the run directory; keep an existing list of other images.

    The list is written in the folder `work` and moved, so that a kill leaves a partial file only there.
    """
    path = run / f"finetune-{subset.tag}-seed{seed}.txt"
    with explain_unwritable(path, "copy the run to a directory you can write"):
        if path.is_file() and path.read_bytes() != subset.text.encode():
            path = path.with_name(f"finetune-{subset.tag}-seed{seed}-{subset.sha256[:8]}.txt")
        write_atomic(work / path.name, subset.text)
        os.replace(work / path.name, path)
        fsync_path(path.parent)
    return path


def _protocol(
    inputs: EvalInputs, subset: LabeledSubset, task: FinetuneTask, score: Score, unreadable: int, *,
    from_scratch: bool,
) -> str:  # fmt: skip
    """Describe the whole measurement in one sentence."""
    s = task.settings
    lr, head_lr = (
        f"{rate:g} for the {part} ({rate * 256 / s.batch_size:g} × batch/256)"
        for rate, part in ((s.lr, "encoder"), (s.head_lr, "head"))
    )
    start = "from scratch (new weights)" if from_scratch else "from the pre-trained encoder"
    sets = describe_sets(
        len(subset.index), len(score.truth), len(task.classes), left_out=score.unlabeled, data=inputs.description
    )
    return (
        f"fine-tuning {start}: whole network and a linear head on {subset.description}, list sha256 "
        f"{subset.sha256[:16]}…, random resized crop and flip at {inputs.spec.image_size} px, SGD (Nesterov momentum "
        f"{s.momentum:g}, weight decay {s.weight_decay:g}), {count(s.epochs, 'epoch')} of "
        f"{count(task.steps_per_epoch, 'step')}, batch {s.batch_size}, learning rate {lr} and {head_lr}, cosine to 0, "
        f"seed {s.seed}; tested on center crops after the last epoch; {sets}"
        + (f"; {count(unreadable, 'image')} could not be read" if unreadable else "")
    )
