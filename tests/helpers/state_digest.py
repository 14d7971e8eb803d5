"""One hash for the whole state of a checkpoint."""

import hashlib

import torch
from torch import Tensor


def digest(tensors: dict[str, Tensor], step: int) -> str:
    """Hash the step and every tensor's name, dtype, shape and bytes: equal only for bit-identical states.

    The golden runs store these hashes, so the format is fixed.
    """
    total = hashlib.sha256(str(step).encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
