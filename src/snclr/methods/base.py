"""Base classes of all methods.

`Method` has one encoder, `MomentumMethod` also a target network, and `TwoWayMethod` two losses, whose backward passes
can run one after the other.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from snclr.methods.common.ema import ema_update, momentum_at, momentum_copy
from snclr.methods.common.features import l2_normalize
from snclr.methods.common.gate import AgreementGate
from snclr.methods.common.heads import mlp
from snclr.methods.common.queue import NeighborQueue
from snclr.methods.config import MethodConfig, QueueConfig


class StepOutput(NamedTuple):
    """Loss of one forward pass, and detached tensors for the metrics."""

    loss: Tensor  # ()
    features: Tensor  # (N, D) normalized projections
    neighbor_ids: Tensor | None = None  # (N, K) image ids, -1 where missing
    found_ids: Tensor | None = None  # (N, K; with a gate at least 10) ids of all neighbors of view 2, used or not
    other_found_ids: Tensor | None = None  # (N, K) of all neighbors of view 1
    neighbor_ages: Tensor | None = None  # (N, K) in steps
    similarity: Tensor | None = None  # (N, K) cosine
    positiveness: Tensor | None = None  # (N, K) w
    pulled: Tensor | None = None  # (N, K) 1 where the image is pulled toward the neighbor, else 0


Views = Sequence[Tensor]
"""The views (N, 3, S, S) of a batch: two, or one if the method masks patches. With some settings more follow: a plain
view, or local crops of another size."""
Losses = Generator[Tensor, None, StepOutput]
"""Yields the losses of a step one by one, and returns its output."""


class Method(nn.Module):
    """A method with one encoder. The trainer uses only what this class declares.

    `forward` returns the loss of one step, and `after_step` runs after the optimizer step. `state_dict()` holds
    everything a resumed run needs, including the queue. `num_features` is the output width of the encoder.
    """

    config: Any  # the config dataclass of the method
    predictor: Any  # the module, (N, dim) → (N, dim), or None for a method without one
    queue: NeighborQueue | None
    projector_bn: bool = True
    """Whether the hidden layers of the projector have a batch norm."""
    loss_parts: int = 1
    """Number of losses that `losses` yields."""
    constant_lr: tuple[str, ...] = ()
    """Names of the child modules whose learning rate stays at its peak; that of the others follows the schedule."""
    micro_batch: int = 0
    """Images that pass through an encoder at once; 0: all of a view. For encoders without batch norm."""

    def __init__(self, encoder: nn.Module, num_features: int, config: MethodConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = encoder
        self.projector = self.build_projector(num_features)
        self.predictor = self.build_predictor()
        if not hasattr(type(self), "queue"):  # in SNCLR a property: the queue is part of its loss
            self.queue = self.build_queue() if isinstance(config, QueueConfig) else None
        self.gate: AgreementGate | None = None  # decides whether neighbors enter the loss; None: always
        self._to_push: tuple[Tensor, ...] | None = None  # the arguments of `push`, of all ranks

    def build_projector(self, num_features: int) -> nn.Module:
        """Return the projector, (N, num_features) → (N, dim); the identity for a method without one."""
        c = self.config
        if "projector_layers" not in c.setting_names():
            return nn.Identity()
        end = {name: getattr(c, name) for name in ("final_bn", "final_scale", "final_bias") if hasattr(c, name)}
        return mlp(num_features, c.hidden, c.dim, layers=c.projector_layers, hidden_bn=self.projector_bn, **end)

    def build_predictor(self) -> nn.Module | None:
        """Return the predictor, (N, dim) → (N, dim), or None for a method without one."""
        c = self.config
        if "predictor_layers" not in c.setting_names():
            return None
        return mlp(
            c.dim, c.hidden, c.dim, layers=c.predictor_layers, final_bn=c.predictor_final_bn, final_bias=c.final_bias
        )

    def build_queue(self) -> NeighborQueue:
        """Return an empty queue of projections."""
        c = self.config
        return NeighborQueue(c.queue_length, c.dim, dtype=getattr(torch, c.queue_dtype))

    @property
    def encoders(self) -> list[nn.Module]:
        """The trained encoder, then its EMA copy if there is one: both start from the same weights."""
        return [child for name, child in self.named_children() if name.removeprefix("momentum_") == "encoder"]

    @property
    def exported_encoder(self) -> nn.Module:
        """The encoder that is saved and evaluated."""
        return self.encoder

    @property
    def target_network(self) -> nn.Module:
        """Network from images (n, 3, S, S) to the features (n, D) that are compared: encoder and projector."""
        return nn.Sequential(self.encoder, self.projector)

    def encode(self, view: Tensor) -> Tensor:
        """Return the features (N, num_features) of a view, in chunks of `micro_batch` images."""
        return in_chunks(self.encoder, view, self.micro_batch)

    def project(self, view: Tensor) -> Tensor:
        """Return the projection y (N, D) of a view."""
        return self.projector(self.encode(view))

    def forward(self, views: Views, ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Return the loss of the views of images `ids` (N,) with `labels` (N,) if known."""
        raise NotImplementedError

    def losses(self, views: Views, ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> Losses:
        """Yield the `loss_parts` losses whose sum is the loss of the step, and return the output of the step.

        No two of them share a graph, and each is built when it is requested. So if the backward pass of one runs before
        the next is requested, only the activations of one are in memory.
        """
        output = self(views, ids, epoch=epoch, labels=labels)
        yield output.loss
        return output._replace(loss=output.loss.detach())

    def compile_parts(self, **options: Any) -> None:
        """Compile encoders and heads with `torch.compile`, which takes the options."""
        for name, child in self.named_children():
            if name.removeprefix("momentum_") in ("encoder", "projector", "predictor"):
                child.compile(**options)

    def after_step(self, step: int, total_steps: int) -> None:
        """Push the features of the step: last, so a batch never finds itself in the queue."""
        if self._to_push is not None:
            self.push(*self._to_push)
            self._to_push = None

    def push(self, *args: Any, **kwargs: Any) -> None:
        """Push `_to_push` into the queue, or into what the method has in its place."""
        assert self.queue is not None
        self.queue.push(*args, **kwargs)

    def settings_use_neighbors(self, epoch: int) -> bool:
        """Return whether the settings let neighbors into the loss of this epoch; the gate may still keep them out."""
        return True


class MomentumMethod(Method):
    """A method with a target network: EMA copies of encoder and projector without gradient.

    A child `momentum_X` is the EMA copy of the child `X`; `after_step` updates it.
    """

    def __init__(self, encoder: nn.Module, num_features: int, config: MethodConfig) -> None:
        super().__init__(encoder, num_features, config)
        self.momentum_encoder = momentum_copy(self.encoder)
        self.momentum_projector = momentum_copy(self.projector)

    @property
    def target_network(self) -> nn.Module:
        """Network from images to target projections."""
        return nn.Sequential(self.momentum_encoder, self.momentum_projector)

    def encode_target(self, view: Tensor) -> Tensor:
        """Return the features (N, num_features) of a view by the target network, in chunks of `micro_batch` images."""
        return in_chunks(self.momentum_encoder, view, self.micro_batch)

    @torch.no_grad()
    def target_projections(self, views: Views) -> list[Tensor]:
        """Return the target projection of each view. Call it before the online pass to save memory."""
        return [self.momentum_projector(self.encode_target(view)) for view in views]

    def after_step(self, step: int, total_steps: int) -> None:
        """Update the target network, then the queue."""
        m = momentum_at(step, total_steps, self.config.momentum, self.config.momentum_schedule)
        for name, target in self.named_children():
            if name.startswith("momentum_"):
                ema_update(self.get_submodule(name.removeprefix("momentum_")), target, m)
        super().after_step(step, total_steps)


class TwoWayMethod(MomentumMethod):
    """A momentum method with two losses, view 1 → 2 and view 2 → 1, that share no graph.

    A subclass defines `direction`, the forward pass of one direction. `losses` computes the target projections of both
    views first and then calls `direction` for each view; a subclass with a queue has its own.
    """

    direction: Callable[..., Any]
    """Encoder, heads and loss of one view; its first argument is the view, the others what it is compared with. This
    part is compiled as a whole."""

    loss_parts = 2

    def compile_parts(self, **options: Any) -> None:
        """Compile each direction as a whole, and the target network, with `torch.compile`, which takes the options."""
        self.disable_compile()
        self.direction = torch.compile(self.direction, **options)
        for name, child in self.named_children():
            if name.startswith("momentum_"):
                child.compile(**options)

    def disable_compile(self) -> None:
        """Exclude loops over tiles and communication with `torch.compiler.disable`: at most one graph break."""

    def scaled(self, values: Tensor, directions: int = 1) -> Tensor:
        """Return the loss as the paper writes it (BYOL: 2 − 2 cos; MoCo v3: times 2τ) from what `direction` returned.

        With `directions` 2, `values` is the sum over both directions.
        """
        return values

    def losses(self, views: Views, ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> Losses:
        """Yield the loss of each direction: of a view with the target projections of the other."""
        target = self.target_projections(views)
        values: list[Tensor] = []
        for view, y2 in ((views[0], target[1]), (views[1], target[0])):
            value = self.direction(view, y2)
            yield self.scaled(value)
            values.append(value.detach())
        return StepOutput(loss=self.scaled(values[0] + values[1], directions=2), features=l2_normalize(target[1]))

    def forward(self, views: Views, ids: Tensor, *, epoch: int, labels: Tensor | None = None) -> StepOutput:
        """Return the sum of the losses, with the graphs of both in memory."""
        losses = self.losses(views, ids, epoch=epoch, labels=labels)
        total = torch.stack([next(losses) for _ in range(self.loss_parts)]).sum()
        return output_after(losses)._replace(loss=total)


def output_after(losses: Losses) -> StepOutput:
    """Return the output of `Method.losses` after its last loss."""
    try:
        next(losses)
    except StopIteration as end:
        return end.value
    raise AssertionError("more losses than loss_parts")


def in_chunks(network: nn.Module, images: Tensor, size: int) -> Tensor:
    """Return `network(images)`, computed for `size` images at a time (0: all at once), with the exact gradient.

    This is gradient caching: the first pass keeps no activations. When the gradient of the loss with respect to the
    output is known, the backward pass computes each chunk again, with its activations. Rows must not depend on each
    other: no batch norm.

    >>> network, images = nn.Linear(3, 2), torch.ones(5, 3)
    >>> torch.allclose(in_chunks(network, images, 2), network(images))
    True
    """
    if size == 0 or size >= len(images):
        return network(images)
    chunks = torch.split(images, size)
    if not torch.is_grad_enabled():
        return torch.cat([network(chunk) for chunk in chunks])
    return torch.cat([checkpoint(network, chunk, use_reentrant=False) for chunk in chunks])
