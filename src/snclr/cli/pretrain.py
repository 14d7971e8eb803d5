"""Print the results of `snclr pretrain`, `plan` and `doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cyclopts import Parameter

from snclr.api.pretrain import doctor, plan, pretrain
from snclr.cli.flags import Command
from snclr.cli.output import print_table, size
from snclr.errors import count, snclr_command
from snclr.runtime.progress import duration, print_wrapped

if TYPE_CHECKING:
    from snclr.diagnostics.suite import DoctorResult
    from snclr.train.planning.run_plan import RunPlan
    from snclr.train.pretrain import PretrainResult

_PRETRAIN_EXAMPLES = """Examples:
  snclr pretrain --data my-photos/ --out runs/photos
  snclr pretrain --recipe cifar --data cifar10 --out runs/cifar --epochs 100
  snclr pretrain --recipe vit-small-imagenet --data imagenet/ --out runs/vit
  snclr pretrain --method byol --data my-photos/ --out runs/byol
  snclr pretrain --resume --out runs/photos

A recipe sets the defaults (`snclr recipes` lists them); a flag overrides the recipe. The defaults shown are those of
the recipe photos, which is used if none is named.
"""
_PLAN_EXAMPLES = """Examples:
  snclr plan --data my-photos/
  snclr plan --data my-photos/ --encoder resnet50 --image-size 224
  snclr plan --recipe cifar --data cifar10 --json
  snclr plan --data my-photos/ --probe-minutes 0   # only time and memory

Builds the encoder, heads and queue of the run, fills the queue and trains a few steps on your images. Nothing is
written. With --devices or --nodes, one rank is measured with its part of the batch. For --method snclr, the run is then
trained for --probe-minutes (default 1) from its start, and its neighbors are measured.
"""
_DOCTOR_EXAMPLES = """Examples:
  snclr doctor
  snclr doctor --devices 8 --json > doctor.json
  snclr doctor --only kernels,methods,resume
  snclr doctor --recipe vit-small-imagenet --only memory,speed,compile

Compares the kernels and some steps of every method with the CPU in float64, a resumed run with an uninterrupted one,
and several ranks with one; counts the waits of the host; measures memory and speed of a recipe. The exit code is 1 if a
check failed. Groups: machine, kernels, methods, overflow, host waits, resume, ranks, memory, speed, compile.
"""


def show_pretrain(result: PretrainResult) -> None:
    """Print where the encoder is and how to load and evaluate it."""
    from snclr.checkpoint.encoder_file import load_encoder, loading_snippet

    print(f"trained to step {result.step}; the encoder is {result.out}/encoder.safetensors")
    if result.skipped:
        print(f"unreadable images: {result.skipped:,}, replaced by others, listed in {result.out}/skipped.jsonl")
    print(f"\nLoad it without snclr:\n\n{loading_snippet(load_encoder(result.out)[1], result.out)}\n")
    print(f"Next: {snclr_command('neighbors', result.out)}")
    data = () if result.labeled else ("--data", "LABELED")
    labels = "the labels of the training images" if result.labeled else "labeled images"
    print(f"      {snclr_command('knn', result.out, *data)}   # with {labels}")
    print(f"      {snclr_command('report', result.out)}")


def show_plan(plan: RunPlan) -> None:
    """Print one fact per line, then the warnings."""
    print_table(["", ""], _facts(plan), left=2)
    for warning in plan.warnings:
        print()
        print_wrapped(warning)


def _facts(plan: RunPlan) -> Iterator[tuple[str, str]]:
    steps = f"{count(plan.steps_per_epoch, 'step')} per epoch, {plan.steps:,} in {count(plan.epochs, 'epoch')}"
    yield "images", f"{plan.images:,} in batches of {plan.batch_size:,}: {steps}"
    if plan.unreadable:
        key, reason = next(iter(plan.unreadable.items()))
        of = "" if plan.checked == plan.images else f" of the {plan.checked:,} checked"
        yield "", f"unreadable images: {len(plan.unreadable):,}{of}, e.g. {key}: {reason}"
    if plan.unread_photos:
        yield "", plan.unread_photos
    waiting = max(0.0, 1 - plan.compute_seconds_per_step / plan.seconds_per_step)
    images = count(plan.batch_size // plan.ranks, "image")
    share = f" (rank 0 of {plan.ranks}, {images})" if plan.ranks > 1 else ""
    measured = f"(measured over {count(plan.tried_steps, 'step')} with a full queue)"
    yield "step", f"{plan.seconds_per_step:.3g} s{share}, {waiting:.0%} of it waiting for data {measured}"
    rate = f"{plan.images_per_second:,.0f}" if plan.images_per_second >= 10 else f"{plan.images_per_second:.2g}"
    yield "run", f"{duration(plan.total_seconds)} at {rate} images/s (calculated)"
    counted = "tensors on the GPU" if plan.memory == "cuda" else "the training process, without data workers"
    yield "memory", f"peak {size(plan.peak_mb)}: {counted} (measured)"
    titles = {"target": "target network", "activations": "activations and views"}
    sizes = {titles.get(name, name): size(megabytes) for name, megabytes in plan.tensor_mb.items() if megabytes}
    total = sizes.pop("total") + (" per rank" if plan.ranks > 1 else "")
    parts = ", ".join(f"{name} {megabytes}" for name, megabytes in sizes.items())
    yield "tensors", f"{total} at the peak of a step (counted): {parts}"
    yield "disk", f"{size(plan.checkpoint_mb)} per checkpoint, the last {plan.keep_checkpoints} are kept"
    if (queue := plan.queue) is not None:
        life = f"{queue.epochs_of_life:.2g}"
        life += " epoch" if life == "1" else " epochs"
        kept = f"a feature stays for {life}, {queue.share_of_images:.0%} of the images are in the queue"
        yield "queue", f"{count(queue.length, 'feature')}, {size(queue.mb)}; {kept}"
        if queue.same_class is not None:
            yield "", f"about {queue.same_class:,.0f} of these images share a given image's class (by the labels)"
    if (probe := plan.probe) is not None:
        chance = ""
        if queue is not None and queue.same_class is not None:
            chance = f" (chance {queue.same_class / (queue.share_of_images * plan.images):.0%})"
        shares = {"agree between two views": probe.agreement, f"have the image's class{chance}": probe.purity}
        shares["are pulled"] = probe.pulled_share
        found = ", ".join(f"{share:.0%} {what}" for what, share in shares.items() if share is not None) or "none found"
        yield "neighbors", f"{found} (after {count(probe.steps, 'step')}, {probe.minutes:g} min)"
    if plan.ranks > 1:
        yield "note", "communication between ranks is not included; see docs/reference/scaling.md"


def show_doctor(result: DoctorResult) -> None:
    """Print one row per check, then what to do about those that failed."""
    rows = [(f"{row.group}: {row.name}", row.outcome, row.value, row.limit) for row in result.rows]
    print_table(["check", "result", "measured", "limit"], rows, left=4)
    for row in result.failed:
        print(f"\nFAILED {row.group}: {row.name}: {row.value}\n  {row.advice}")
        for detail in row.details:
            print(f"    {detail}")
    summary = ", ".join(f"{number} {outcome}" for outcome, number in result.counts.items())
    print(f"\n{result.device}: {count(len(result.rows), 'check')} in {result.seconds:.0f} s: {summary}")
    print("seconds: " + ", ".join(f"{group} {seconds:.0f}" for group, seconds in result.group_seconds.items()))


COMMANDS = {
    "pretrain": Command(
        pretrain, show_pretrain, _PRETRAIN_EXAMPLES, needs=("data", "out"),
        flags={name: Parameter(group="Main options") for name in ("config", "json")},
        resume=lambda given: ["pretrain", "--resume", "--out", given["out"]],
    ),
    "plan": Command(
        plan, show_plan, _PLAN_EXAMPLES, without=("resume",), needs=("data",),
        hidden=("out", "overwrite", "init_from"),  # accepted, as the command of the run has them
    ),
    "doctor": Command(doctor, show_doctor, _DOCTOR_EXAMPLES),
}  # fmt: skip
