"""Many linear classifiers trained at once, one for each learning rate, by one matrix product a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_SMALL_STEP = 2**28  # multiplications of one product: some ten milliseconds of one core


class LinearHeads:
    """G softmax classifiers (d features, C classes), trained by SGD with momentum 0.9 and no weight decay.

    They start at zero: the problem is convex, so no random start is needed. All see the same batches and differ in
    their learning rate alone. The gradient is written out, since it is one line and all heads share its product.

    >>> heads = LinearHeads(2, 2, learning_rates=[0.1, 1.0])
    >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    >>> loss = heads.step(x, y)
    >>> heads.logits(x).argmax(dim=2).tolist()  # (G, n)
    [[0, 1], [0, 1]]
    """

    momentum = 0.9

    def __init__(
        self, dim: int, num_classes: int, learning_rates: Sequence[float], *, device: torch.device | str = "cpu"
    ) -> None:
        self.shape = (len(learning_rates), num_classes)
        columns = len(learning_rates) * num_classes
        self.weight = torch.zeros(dim, columns, device=device)  # heads side by side: one product for all
        self.bias = torch.zeros(columns, device=device)
        self._speed = torch.zeros_like(self.weight), torch.zeros_like(self.bias)
        self._lr = torch.tensor(learning_rates, device=device).repeat_interleave(num_classes)

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        """One step on features (n, d) and classes (n,), learning rates times `scale`; the losses (G,) before it."""
        log_p = self._scores(x).log_softmax(dim=2)  # (n, G, C)
        picked = y[:, None, None].expand(-1, self.shape[0], 1)
        loss = -log_p.gather(2, picked).mean(dim=(0, 2))
        # What lies below is no gradient, but denormal numbers, which slow the product down tenfold.
        gradient = (
            log_p.clamp_(min=-50).exp_().scatter_add_(2, picked, torch.full_like(picked, -1, dtype=x.dtype))
        )  # p − one-hot
        gradient = gradient.flatten(1).div_(len(x))
        speed, bias_speed = self._speed
        speed.mul_(self.momentum).addmm_(x.T, gradient)
        bias_speed.mul_(self.momentum).add_(gradient.sum(dim=0))
        self.weight.addcmul_(speed, self._lr, value=-scale)
        self.bias.addcmul_(bias_speed, self._lr, value=-scale)
        return loss

    def state(self) -> dict[str, Tensor]:
        """All that a training goes on from, not copied."""
        return {"weight": self.weight, "bias": self.bias, "speed": self._speed[0], "bias_speed": self._speed[1]}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Put back what `state` gave."""
        for name, value in self.state().items():
            value.copy_(state[name])

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Scores of features (n, d) by every head: (G, n, C)."""
        return self._scores(x).transpose(0, 1)

    @contextlib.contextmanager
    def fitting_threads(self, batch: int) -> Iterator[None]:
        """One thread inside the block where a step on the CPU is so small that threads would wait more than work."""
        before = torch.get_num_threads()
        small = self.weight.device.type == "cpu" and batch * self.weight.numel() < _SMALL_STEP
        try:
            if small:
                torch.set_num_threads(1)
            yield
        finally:
            torch.set_num_threads(before)

    def _scores(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight).view(len(x), *self.shape)
