"""Color transforms of a batch on its device, with one strength per image.

Images are float (n, 3, H, W) in [0, 1]; a factor is a tensor (n,). The formulas are those of torchvision. Each result
depends bit for bit on its own image alone: only element-wise operations and exact integer sums are used, no reduction
whose order depends on the batch size.
"""

import torch
from torch import Tensor


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply the images by their factors."""
    return (x * _wide(factor)).clamp_(0, 1)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Move the images away from (factor > 1) or toward (factor < 1) their mean gray."""
    # A sum of integers is the same in any order; 2^-20 is far below a gray level (1/255).
    fixed = gray(x).mul_(2**20).round_().to(torch.int64)
    mean = fixed.sum(dim=(1, 2, 3)).to(x.dtype) * (2.0**-20 / (x.shape[2] * x.shape[3]))
    return _blend(x, _wide(mean), factor)


def saturation(x: Tensor, factor: Tensor) -> Tensor:
    """Move the images away from or toward their gray version."""
    return _blend(x, gray(x), factor)


def hue(x: Tensor, shift: Tensor) -> Tensor:
    """Shift the hue by -0.5 to 0.5 of the color circle."""
    r, g, b = x.unbind(1)
    value = torch.maximum(torch.maximum(r, g), b)
    chroma = value - torch.minimum(torch.minimum(r, g), b)
    # Masks of 0 and 1: `torch.where` is slow on a CPU.
    red = _equal(value, r)
    green = _equal(value, g).mul_(1 - red)
    blue = (1 - red).sub_(green)
    # The hue in sixths of a turn: 0 is red, 2 green, 4 blue.
    turn = (g - b).mul_(red).add_((b - r).mul_(green)).add_((r - g).mul_(blue))
    turn.div_(chroma + _equal(chroma, 0))
    turn.add_(green.mul_(2)).add_(blue.mul_(4)).add_(shift.view(-1, 1, 1) * 6)
    return torch.stack([_channel(value, chroma, turn + offset) for offset in (5, 3, 1)], 1)


def gray(x: Tensor) -> Tensor:
    """Return the luma (n, 1, H, W)."""
    return x[:, 0:1] * 0.2989 + x[:, 1:2] * 0.587 + x[:, 2:3] * 0.114


def solarize(x: Tensor) -> Tensor:
    """Invert the pixels at or above one half."""
    return torch.minimum(x, 1 - x)


def blur_weights(sigma: Tensor, kernel: int, height: int, width: int) -> Tensor:
    """Return the weights (n, reach + 1), float64, the center first, of sigma (n,) in pixels and `kernel` (odd) taps."""
    assert kernel % 2 == 1
    reach = min(kernel // 2, height - 1, width - 1)  # reflection padding is limited to the image size
    weights = torch.exp(-0.5 * (torch.arange(reach + 1) / sigma[:, None].double()) ** 2)
    return weights / (2 * weights.sum(1, keepdim=True) - weights[:, :1])


def blur(x: Tensor, weights: Tensor) -> Tensor:
    """Apply Gaussian blur with `blur_weights` (n, reach + 1) in the precision of x, with reflection padding."""
    if x.device.type != "cpu":
        return blur_by_products(x, weights)
    weights = weights[:, : max(1, int((weights != 0).any(0).sum()))]  # the others add 0
    return _convolve(_convolve(x, weights, axis=3), weights, axis=2)


def blur_by_products(x: Tensor, weights: Tensor) -> Tensor:
    """Compute `blur` as two matrix products: few kernels, for a GPU. It equals the sum over the taps up to rounding."""
    rows, columns = (_band_matrix(weights, x.shape[axis]) for axis in (2, 3))
    across = torch.bmm(x.flatten(1, 2), columns.mT).view(x.shape)
    return torch.matmul(rows[:, None], across)


def _band_matrix(weights: Tensor, size: int) -> Tensor:
    """Return the matrices (n, size, size) of a convolution with symmetric weights (n, reach + 1) and reflection."""
    reach = weights.shape[1] - 1
    offset = torch.arange(-reach, reach + 1, device=weights.device)
    place = (torch.arange(size, device=weights.device)[:, None] + offset).abs()
    place = size - 1 - (size - 1 - place).abs()  # (size, taps)
    shape = (len(weights), size, len(offset))
    values = weights[:, offset.abs()][:, None].expand(shape)
    matrices = weights.new_zeros(len(weights), size, size)
    return matrices.scatter_add_(2, place.expand(shape), values.contiguous())


def _convolve(x: Tensor, weights: Tensor, axis: int) -> Tensor:
    """Convolve along one axis with symmetric weights (n, reach + 1), the center first."""
    reach, size = weights.shape[1] - 1, x.shape[axis]
    padding = (reach, reach, 0, 0) if axis == 3 else (0, 0, reach, reach)
    padded = torch.nn.functional.pad(x, padding, mode="reflect")
    out, both = x * _wide(weights[:, 0]), torch.empty_like(x)
    for k in range(1, reach + 1):
        torch.add(padded.narrow(axis, reach - k, size), padded.narrow(axis, reach + k, size), out=both)
        out += both.mul_(_wide(weights[:, k]))
    return out


def _equal(a: Tensor, b: Tensor | float) -> Tensor:
    """Return 1 where a equals b, else 0, in the type of a: on a CPU several times as fast as a tensor of booleans."""
    return torch.eq(a, b, out=torch.empty_like(a))


def _channel(value: Tensor, chroma: Tensor, turn: Tensor) -> Tensor:
    """Return one color channel from value, chroma and a hue in sixths, offset 5, 3 or 1 for red, green or blue."""
    turn -= 6 * torch.floor(turn / 6)
    return value.sub(torch.minimum(turn, 4 - turn).clamp_(0, 1).mul_(chroma)).clamp_(0, 1)


def _blend(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return (x * _wide(factor)).add_(other * _wide(1 - factor)).clamp_(0, 1)


def _wide(values: Tensor) -> Tensor:
    return values.reshape(-1, 1, 1, 1)
