"""Which operation of a step runs in which precision, on fake tensors with the rules of autocast."""

import collections

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from snclr.errors import UserError
from snclr.train.build import build_method, encoder_spec
from snclr.train.config import resolve, settings_for_method
from snclr.train.planning.memory import LiveBytes, _run_step
from tests.methods.test_methods import SMALL

HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Recorder(LiveBytes):
    """The dtypes of the floating-point results of each operation."""

    def __init__(self):
        super().__init__()
        self.dtypes = collections.defaultdict(set)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        results = [value for value in tree_leaves(out) if isinstance(value, torch.Tensor) and value.is_floating_point()]
        self.dtypes[func.overloadpacket.__name__].update(value.dtype for value in results)
        return out


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize(
    ("method", "encoder"), [("snclr", "resnet10-tiny"), ("snclr", "test_vit"), ("byol", "test_vit")]
)
def test_networks_run_in_half_and_losses_norms_and_weights_in_single_precision(precision, method, encoder):
    given = {**SMALL, "method": method, "encoder": encoder, "precision": precision, "stem": "auto"}
    config = resolve(settings_for_method(method, given))
    assert config.precision == precision.removesuffix("-mixed")
    with torch.device("meta"):
        built = build_method(config, encoder_spec(config)).train()
    with FakeTensorMode(allow_non_fake_inputs=True), Recorder() as recorder:
        built.to_empty(device="cpu")
        if built.queue is not None:
            built.queue._size = built.queue.capacity
        _run_step(built, config, 8)
    found, single = recorder.dtypes, {torch.float32}
    assert found["convolution"] == {HALF[precision]}
    assert HALF[precision] in found["mm"]  # linear layers without bias
    assert (torch.float32 in found["mm"]) == (method == "snclr")  # similarities and tiles of the loss
    for name in ("exp", "exp_", "log", "logsumexp", "linalg_vector_norm", "amax", "native_layer_norm", "topk"):
        assert found.get(name, single) == single, name
    trained = [p for p in built.parameters() if p.requires_grad]
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in trained)
    assert all(b.dtype in (torch.float32, torch.int64) for b in built.buffers())


def test_other_names_are_refused():
    with pytest.raises(UserError, match="precision must be one of 32, bf16, 16, 64, bf16-mixed, 16-mixed, not 'fp8'"):
        resolve({"precision": "fp8"})
