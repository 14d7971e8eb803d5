"""`snclr finetune`: the whole network trained on a few labels, as the semi-supervised tables of the field are made."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snclr.commands.evaluation import Session, Subject, add_common_flags, finish, open_subject, session, show
from snclr.errors import UserError

if TYPE_CHECKING:
    from snclr.evaluate.finetune import FinetuneSettings, Finetuning, Score
    from snclr.evaluate.subsets import LabelledSubset

BATCH_SIZE = 256
BASE_LR = 0.05
EXAMPLES = """examples:
  snclr finetune runs/photos --data labelled-photos/ --labels 10%
  snclr finetune runs/resnet50 --data imagenet/ --labels 1percent.txt --workers 8   # a published list
  snclr finetune runs/photos --data labelled-photos/ --labels 10% --from-scratch --epochs 200 --lr 0.1

The defaults are SimCLR's: SGD with Nesterov momentum 0.9, learning rate 0.05 × batch/256 for encoder and head, cosine
to 0, no weight decay, random resized crops and flips, 60 epochs up to 1% of the labels and 30 above. --from-scratch
starts from new weights: the "supervised" row, which needs its own learning rate and more epochs to be a fair one.
The same command again goes on where an interrupted one stopped.
"""

_UNWRITABLE = "copy the run to a place you own"


def finetune(
    run: str | Path,
    *,
    data: str | None = None,
    test: str | None = None,
    labels: str | Path = "10%",
    from_scratch: bool = False,
    epochs: int | None = None,
    batch_size: int = BATCH_SIZE,
    lr: float = BASE_LR,
    head_lr: float | None = None,
    weight_decay: float = 0.0,
    workers: int = 0,
    device: str = "auto",
    devices: str | int = "1",
    nodes: int = 1,
    seed: int = 0,
    quiet: bool = False,
) -> dict[str, Any]:
    """Fine-tune a run on a part of the labels and test it; the result is also added to results.jsonl.

    `lr` and `head_lr` (default: the same) are base rates, × batch/256. `labels` is a share or a list file.
    A stop (Ctrl-C, SIGTERM) saves, and gives a dict with `complete` False and an `exit_code`; the same call goes on.
    """
    from snclr.distributed import same_on_all, together
    from snclr.evaluate.resume import Interrupted
    from snclr.evaluate.scoring import match_labels
    from snclr.evaluate.subsets import choose_subset

    with session(device=device, devices=devices, nodes=nodes, quiet=quiet) as at:
        try:
            s = open_subject(at, run, data, test, seed=seed)
        except Interrupted as error:
            return at.stopped("finetune", error)
        with together():  # a list of images may be another on another machine
            train_labels, test_labels, _ = match_labels(s.train, s.test)
            subset = choose_subset(s.train, train_labels, labels, seed=seed)
            settings = _settings(
                subset, epochs=epochs, batch_size=batch_size, lr=lr, head_lr=head_lr, weight_decay=weight_decay,
                seed=seed,
            )  # fmt: skip
            job = _prepare(s, subset, settings, test_labels, from_scratch=from_scratch, workers=workers)
        same_on_all(lambda: subset.sha256, f"images in {labels}")
        facts = {"labels": str(labels), "list": _write_list(s.run, subset, seed, at.first).name}
        steps = {"total_steps": job.total_steps, "checkpoints": str(job.checkpoints)}
        with _locked(job.checkpoints.parent, at.first):
            try:
                step = _train(at, job, words=_opening(s, subset, settings, from_scratch))
                if step < job.total_steps:
                    assert at.stop.requested is not None
                    return at.stopped("finetune", Interrupted(at.stop.requested), step=step, **steps)
                return _test(at, s, job, subset, test_labels, from_scratch=from_scratch, base=(lr, head_lr), **facts)
            except Interrupted as error:  # in the test
                return at.stopped("finetune", error, step=job.total_steps, **steps)


def _test(
    at: Session, s: Subject, job: Finetuning, subset: LabelledSubset, test_labels: Any, *, from_scratch: bool,
    base: tuple[float, float | None], **facts: Any,
) -> dict[str, Any]:  # fmt: skip
    """Test what was trained and write the result; then nothing is left to go on with."""
    from snclr.durable import discard
    from snclr.evaluate.finetune import evaluate_classifier
    from snclr.export.encoder import weights_digest

    score = evaluate_classifier(
        job.model, job.classes, s.test, test_labels, image_size=s.spec.image_size, workers=job.workers, device=s.device,
        quiet=at.quiet, stop=at.stop,
    )  # fmt: skip
    skipped = job.skipped
    record = at.record(
        s.run,
        "finetune-scratch" if from_scratch else "finetune",
        {"top1": score.top1, "top5": score.top5},
        _protocol(s, subset, job, score, len(skipped), from_scratch=from_scratch, base=base),
        settings=asdict(job.settings),
        **facts,
        list_sha256=subset.sha256,
        model_sha256=weights_digest(job.model.state_dict()),
        skipped=[asdict(skip) for skip in (*skipped, *score.skipped)],
    )
    if at.first:
        discard(job.checkpoints.parent)
    return record


def _settings(
    subset: LabelledSubset, *, epochs: int | None, batch_size: int, lr: float, head_lr: float | None,
    weight_decay: float, seed: int,
) -> FinetuneSettings:  # fmt: skip
    from snclr.evaluate.finetune import FinetuneSettings, default_epochs
    from snclr.train.optim import scaled_lr

    batch = _shared_batch(batch_size, len(subset.index))
    return FinetuneSettings(
        epochs=default_epochs(subset.share) if epochs is None else epochs,
        batch_size=batch,
        lr=scaled_lr(lr, max(batch, 1)),
        head_lr=scaled_lr(lr if head_lr is None else head_lr, max(batch, 1)),
        weight_decay=weight_decay,
        seed=seed,
    )


def _shared_batch(given: int, images: int) -> int:
    """The batch that was given, or where the images are fewer, as many of them as the processes can share equally."""
    from snclr.distributed import rank_and_size

    processes = rank_and_size()[1]
    if images >= given:
        return given
    if images < processes:
        raise UserError(f"{images} labelled images cannot be shared by {processes} processes; give --devices 1")
    return images - images % processes


def _prepare(
    s: Subject, subset: LabelledSubset, settings: FinetuneSettings, test_labels: Any, *, from_scratch: bool,
    workers: int,
) -> Finetuning:  # fmt: skip
    """The model, its data and where its checkpoints are: a folder of its own for each different fine-tuning."""
    import torch

    from snclr.data.splits import take
    from snclr.evaluate.finetune import Finetuning, build_classifier, subset_classes
    from snclr.export.encoder import weights_digest

    source = take(s.train, subset.index)
    assert source.labels is not None
    classes = subset_classes(torch.from_numpy(source.labels), torch.from_numpy(test_labels[test_labels >= 0]))
    identity = {
        "settings": asdict(settings),
        "start": "scratch" if from_scratch else weights_digest(s.encoder.state_dict()),
        "encoder": s.spec.to_dict(),
        "list_sha256": subset.sha256,
        "data": source.fingerprint(),
        "classes": classes.tolist(),
    }
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    model = build_classifier(s.encoder, s.spec, len(classes), from_scratch=from_scratch, seed=settings.seed)
    return Finetuning(
        model, source, classes, settings, s.spec.image_size, s.run / f"finetune-{subset.tag}-{name}" / "checkpoints",
        identity, workers=workers, device=s.device,
    )  # fmt: skip


def _write_list(run: Path, subset: LabelledSubset, seed: int, first: bool) -> Path:
    """The list of the images, in the run folder; one of the same name with other images is kept."""
    from snclr.distributed import broadcast_object, together
    from snclr.durable import explain_unwritable, write_atomic

    path = run / f"finetune-{subset.tag}-seed{seed}.txt"
    with together():
        if first:
            with explain_unwritable(path, _UNWRITABLE):
                if path.is_file() and path.read_bytes() != subset.text.encode():
                    path = path.with_name(f"finetune-{subset.tag}-seed{seed}-{subset.sha256[:8]}.txt")
                write_atomic(path, subset.text)
    return broadcast_object(path)


@contextlib.contextmanager
def _locked(folder: Path, first: bool) -> Iterator[None]:
    from snclr.distributed import together
    from snclr.durable import FileLock, lock_folder, sweep

    lock = FileLock(folder / ".finetune.lock")
    with together():
        if first:
            lock_folder(lock, "the same fine-tuning", _UNWRITABLE)
            sweep(folder)  # what a kill in the deletion at the end of an earlier one left
    try:
        yield
    finally:
        lock.release()


def _train(at: Session, job: Finetuning, *, words: str) -> int:
    """Train to the end, or until a stop is asked for; the steps done."""
    from snclr.progress import Progress

    total = job.total_steps * job.settings.batch_size
    with Progress("fine-tuning", total, quiet=at.quiet) as progress:
        progress.say(words)
        return job.train(progress, at.stop)


def _opening(s: Subject, subset: LabelledSubset, settings: FinetuneSettings, from_scratch: bool) -> str:
    start = "new weights" if from_scratch else f"the weights of {s.run}"
    return f"fine-tuning {s.spec.name} from {start} on {subset.words}, {settings.epochs} epochs, on {s.device}"


def _protocol(
    s: Subject, subset: LabelledSubset, job: Finetuning, score: Score, unread: int, *, from_scratch: bool,
    base: tuple[float, float | None],
) -> str:  # fmt: skip
    """How it was measured, in full; `unread` training images could not be read."""
    from snclr.evaluate.scoring import describe_sets

    settings = job.settings
    head = base[0] if base[1] is None else base[1]
    rates = f"learning rate {settings.lr:g} for the encoder ({base[0]:g} × batch/256) and {settings.head_lr:g} for the "
    rates += f"head ({head:g} × batch/256)"
    start = "from scratch (new weights)" if from_scratch else "from the pre-trained encoder"
    unreadable = unread + len(score.skipped)
    return (
        f"fine-tuning {start}: whole network and a linear head on {subset.words}, list sha256 {subset.sha256[:16]}…, "
        f"random resized crop and flip at {s.spec.image_size} px, SGD (Nesterov momentum {settings.momentum:g}, weight "
        f"decay {settings.weight_decay:g}), {settings.epochs} epochs of {job.loader.steps_per_epoch} steps, batch "
        f"{settings.batch_size}, {rates}, cosine to 0, seed {settings.seed}; tested on centre crops after the last "
        "epoch; "
        + describe_sets(len(subset.index), score.images, len(job.classes), left_out=score.left_out, data=s.words)
        + (f"; {unreadable} images could not be read" if unreadable else "")
    )


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Flags of the command."""
    parser.epilog = EXAMPLES
    add_common_flags(parser, cache=False)
    parser.add_argument(
        "--labels", default="10%", metavar="SHARE|FILE",
        help="a share of the training part's labels such as 1%% or 10%%, or a file with the name of an image a line",
    )  # fmt: skip
    parser.add_argument("--from-scratch", action="store_true", help="start from new weights instead of the run's")
    parser.add_argument("--epochs", type=int, metavar="N", help="passes over the labelled images (default: 60 or 30)")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE, metavar="N", help="at most the labelled images")
    parser.add_argument("--lr", type=float, default=BASE_LR, metavar="X", help="base learning rate, × batch/256")
    parser.add_argument("--head-lr", type=float, metavar="X", help="the head's base learning rate (default: --lr)")
    parser.add_argument("--weight-decay", type=float, default=0.0, metavar="X", help="of all weights")
    parser.set_defaults(handler=_run)


def _run(a: argparse.Namespace) -> int:
    record = finetune(
        a.run, data=a.data, test=a.test, labels=a.labels, from_scratch=a.from_scratch, epochs=a.epochs,
        batch_size=a.batch_size, lr=a.lr, head_lr=a.head_lr, weight_decay=a.weight_decay, workers=a.workers,
        device=a.device, devices=a.devices, nodes=a.nodes, seed=a.seed, quiet=a.json,
    )  # fmt: skip
    return finish(record, a, show)
