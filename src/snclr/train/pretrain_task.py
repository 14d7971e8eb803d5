"""The pre-training task: one step of a self-supervised method, and its measurements."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from snclr.checkpoint.encoder_file import save_snapshot
from snclr.checkpoint.format import Checkpoint
from snclr.checkpoint.run_dir import RunDir
from snclr.data.datasets.base import ImageDataset
from snclr.data.labels import chance_levels
from snclr.data.loader import Batch, ViewLoader
from snclr.distributed.collectives import all_gather, all_reduce_sum
from snclr.errors import UserError
from snclr.io.atomic import write_atomic
from snclr.methods.base import StepOutput, output_after
from snclr.methods.common.gate import COMPARED_NEIGHBORS, AgreementGate
from snclr.models.encoders import EncoderSpec
from snclr.train.config import PretrainConfig
from snclr.train.health import PURITY_IN_TRAINING, collapsed, health
from snclr.train.metrics import MetricsLog
from snclr.train.optim import scaled_lr
from snclr.train.schedule import cosine, warmup_cosine
from snclr.train.trainer import LoaderTask, check_finite, log_warning

COLLAPSE_ADVICE = (
    "the features have collapsed: the encoder maps all images to nearly the same feature. Try a lower --lr, a longer"
    " --warmup-epochs, a higher --momentum, or a larger --batch-size"
)
PUSH_ADVICE = (
    "fewer than half of the neighbors are pulled: the weights of the others are below count × exp(−loss), so the loss"
    " pushes the images away from them. Try --gamma pull, --gamma max or --neighbor-weights hard"
)
NONFINITE_ADVICE = (
    "The last checkpoint is intact: start another run from its weights (--init-from) or from scratch, with a lower"
    " --lr, --clip-gradient 1 or --precision 32."
)


@dataclass
class PretrainTask(LoaderTask):
    """A method, its optimizer and its data, on this rank's device."""

    config: PretrainConfig
    fabric: Any
    dataset: ImageDataset
    loader: ViewLoader
    spec: EncoderSpec
    module: Any
    """The `Method`, without the wrapper of Fabric."""
    wrapped: Any
    """The method wrapped by Fabric, for `no_backward_sync` and `clip_gradients`."""
    optimizer: Any
    """Wrapped by Fabric."""
    initial_weights: list[str]
    """What was loaded by --init-from, and warnings about it; empty without."""

    def __post_init__(self) -> None:
        self.run = RunDir(self.config.out)
        self.steps_per_epoch = self.loader.steps_per_epoch
        self.total_steps = self.config.epochs * self.steps_per_epoch
        self._data_fingerprint = self.dataset.fingerprint()
        labels = self.dataset.labels
        self.labels = None if labels is None else torch.from_numpy(labels).to(self.fabric.device)
        self._collapsed = False
        self._purity_printed = False  # whether its definition was printed
        # Losses since the start of the epoch. The sum stays on the device: reading it would wait for the step.
        self._loss_sum, self._loss_steps = torch.zeros((), device=self.fabric.device), 0
        self._pushed_since: int | None = None  # the step since which fewer than half of the neighbors are pulled
        self._push_warned = False
        self._neighbors_used: bool | None = None  # whether neighbors are in the loss, as printed last

    def step(self, batch: Batch, *, log: bool) -> dict[str, Any]:
        """Run `training_step`; if `log`, also measure loss and health of the global batch and return them."""
        output, lr, gradient_norm = self.training_step(batch)
        return self._measure(batch, output, lr, gradient_norm) if log else {}

    def training_step(self, batch: Batch) -> tuple[StepOutput, float, float]:
        """Update the weights once; return the method's output, learning rate and gradient norm before clipping."""
        config = self.config
        peak = scaled_lr(config.lr, config.batch_size)
        warmup_steps = round(config.warmup_epochs * self.steps_per_epoch)
        lr = warmup_cosine(batch.step, total_steps=self.total_steps, warmup_steps=warmup_steps, peak=peak)
        for group in self.optimizer.param_groups:
            group["lr"] = peak if group["constant_lr"] else lr
            if group["decays"] and config.weight_decay_end is not None:
                group["weight_decay"] = cosine(
                    batch.step, total_steps=self.total_steps, start=config.weight_decay, end=config.weight_decay_end
                )
        # Dropout and drop-path use the global generator. Seeding it by the step leaves no generator state to save.
        torch.manual_seed(config.seed * 1_000_003 + batch.step)
        output = self._add_gradients(batch)
        max_norm = math.inf if config.clip_gradient is None else config.clip_gradient
        norm = self.fabric.clip_gradients(self.wrapped, self.optimizer, max_norm=max_norm, error_if_nonfinite=False)
        loss, gradient_norm = check_finite(
            batch.step, output.loss, batch.ids, gradient_norm=norm, report=self.run.nonfinite,
            check_gradient=config.precision != "16",  # the loss scaler skips steps that overflow
            advice=NONFINITE_ADVICE,
        )  # fmt: skip
        first = batch.step % self.steps_per_epoch == 0
        self._loss_sum, self._loss_steps = (loss, 1) if first else (self._loss_sum + loss, self._loss_steps + 1)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.module.after_step(batch.step, self.total_steps)  # target network, then queue
        return output, lr, gradient_norm

    def _add_gradients(self, batch: Batch) -> StepOutput:
        """Run forward and backward pass of each loss of the method; the ranks average the sum of the gradients.

        A backward pass frees the graph of its loss before that of the next loss is built. `losses` is called on the
        bare module, so precision is applied here. Averaging needs no wrapped forward: it hooks the parameters
        (`distributed/gradients.py`).
        """
        precision, parts = self.fabric.strategy.precision, self.module.loss_parts
        views = precision.convert_input(batch.views)
        losses = self.module.losses(views, batch.ids, epoch=batch.epoch, labels=batch.labels)
        for part in range(1, parts + 1):
            with precision.forward_context():
                loss = next(losses)
            with self.fabric.no_backward_sync(self.wrapped, enabled=part < parts):
                self.fabric.backward(loss)
        with precision.forward_context():
            return output_after(losses)

    def _measure(self, batch: Batch, output: StepOutput, lr: float, gradient_norm: float) -> dict[str, Any]:
        """Measure the global batch: the values do not depend on the world size."""
        loss = all_reduce_sum(output.loss.detach().clone()) / self.fabric.world_size
        tensors = {name: tensor for name, tensor in output._asdict().items() if name != "loss" and tensor is not None}
        gathered = StepOutput(loss=loss, **{name: all_gather(tensor) for name, tensor in tensors.items()})
        queue = self.module.queue
        values = {"loss": float(loss), **health(gathered, self.labels, all_gather(batch.ids))}
        if queue is not None:
            values["queue_fill"] = len(queue) / queue.capacity
        if "neighbor_purity" in values and not self._purity_printed:
            chance = chance_levels(self.dataset.labels)["neighbor_purity"]
            self.progress.print(f"neighbor purity: {PURITY_IN_TRAINING}; chance {chance:.0%}")
            self._purity_printed = True
        # Features that predict masked patches may be nearly equal; the loss keeps them from becoming equal.
        is_collapsed = not self.config.method_config.masks_patches and collapsed(
            values, min(self.config.batch_size - 1, output.features.shape[1])
        )
        if is_collapsed and not self._collapsed:
            self._warn(batch.step, COLLAPSE_ADVICE)
        self._collapsed = is_collapsed
        self._check_pulled(batch.step, values.get("pulled_share"))
        if (gate := self.module.gate) is not None and batch.epoch > 0:
            gate_decides = self.module.settings_use_neighbors(batch.epoch)
            used = gate_decides and gate.is_open(batch.epoch)
            values["neighbors_used"] = float(used)
            if gate_decides and used != self._neighbors_used:
                self._neighbors_used = used
                self._print_gate(batch.epoch, gate, used)
        return {**values, "lr": lr, "gradient_norm": gradient_norm, "collapsed": is_collapsed}

    def _print_gate(self, epoch: int, gate: AgreementGate, used: bool) -> None:
        """Print whether the gate lets neighbors into the loss."""
        state = f"the neighbors are {'' if used else 'not '}in the loss"
        found = f"{gate.agreement:.0%} of the {COMPARED_NEIGHBORS} nearest were found from both views of an image"
        over = f"on average over epoch {epoch}"
        self.progress.print(f"epoch {epoch + 1}: {state}: {over}, {found} (--min-agreement {gate.minimum:g})")

    def _check_pulled(self, step: int, share: float | None) -> None:
        """Warn once, after a whole epoch in which fewer than half of the neighbors were pulled; single steps vary."""
        if share is None or share >= 0.5:
            self._pushed_since = None
        elif self._pushed_since is None:
            self._pushed_since = step
        elif step - self._pushed_since >= self.steps_per_epoch and not self._push_warned:
            self._warn(step, PUSH_ADVICE)
            self._push_warned = True

    def _warn(self, step: int, advice: str) -> None:
        text = f"warning: step {step + 1}: {advice}"
        self.progress.print(text)
        log_warning(text)

    def display(self, step: int, values: Mapping[str, Any]) -> dict[str, str]:
        """Return the values shown beside the progress bar."""
        titles = {
            "loss": ("loss", "{:.3f}"),
            "spread": ("spread", "{:.2f}"),
            "effective_rank": ("effective rank", "{:.0f}"),
            "neighbor_purity": ("neighbor purity", "{:.0%}"),
            "queue_knn": ("queue kNN", "{:.0%}"),
            "neighbor_agreement": ("agreement", "{:.0%}"),
            "pulled_share": ("pulled", "{:.0%}"),
        }
        epoch = f"{-(-step // self.steps_per_epoch)}/{self.config.epochs}"
        shown = {title: text.format(values[name]) for name, (title, text) in titles.items() if name in values}
        return {"epoch": epoch, **shown}

    def epoch_means(self) -> dict[str, str]:
        """Return the mean loss of the epoch's steps."""
        return {"loss": f"{float(self._loss_sum) / self._loss_steps:.3f} (mean)"}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return method, queue, optimizer, loss scale, the losses of the epoch and the list of unreadable images."""
        tensors, info = super().state()
        precision = self.fabric.strategy.precision.state_dict()  # the loss scale of 16-bit precision; else empty
        losses = {"epoch_loss_sum": float(self._loss_sum), "epoch_loss_steps": self._loss_steps}
        return tensors, {**info, "precision": precision, "data": self._data_fingerprint, **losses}

    def load_state(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint of this run."""
        if checkpoint.info["data"] != self._data_fingerprint:
            raise UserError(
                f"the images of {self.config.data} are not those the run was trained on: names or number have changed."
                " Restore the data, or start a new run with --init-from."
            )
        super().load_state(checkpoint)
        self.fabric.strategy.precision.load_state_dict(checkpoint.info["precision"])
        # Older checkpoints have no losses: the mean is then that of the steps since the resume.
        self._loss_sum.fill_(checkpoint.info.get("epoch_loss_sum", 0.0))
        self._loss_steps = checkpoint.info.get("epoch_loss_steps", 0)

    def checkpoint_bytes(self) -> int:
        """Return the size of the tensors of a checkpoint after the first step, when the optimizer has its moments."""
        moments = 2 if self.config.optimizer == "adamw" else 1
        trained = sum(parameter.nbytes for parameter in self.module.parameters() if parameter.requires_grad)
        return sum(tensor.nbytes for tensor in self.module.state_dict().values()) + moments * trained

    def on_epoch(self, step: int, metrics: MetricsLog) -> None:
        """Add about ten neighbor grids per run to TensorBoard, and the projections after the last epoch."""
        queue, epoch = self.module.queue, step // self.steps_per_epoch
        if queue is None or self.dataset.remote or (epoch % -(-self.config.epochs // 10) and step < self.total_steps):
            return
        from snclr.train.tensorboard_images import neighbor_grid, write_projector

        if (grid := neighbor_grid(queue, self.dataset)) is not None:
            metrics.write_image(step, "neighbors", grid)
        if step == self.total_steps:
            write_projector(self.run.tensorboard, queue, self.dataset)

    def on_save(self, step: int) -> None:
        """Write skipped.jsonl (the unreadable images and the reasons) and, if it is due, an encoder snapshot."""
        write_atomic(self.run.skipped, "".join(json.dumps(asdict(skip)) + "\n" for skip in self.loader.skipped))
        encoder, keep = self.module.exported_encoder, self.config.keep_encoders
        save_snapshot(self.run, encoder, step, total_steps=self.total_steps, keep=keep)
