"""torch.compile of each direction: few graph breaks, and the same loss and gradients as without."""

import pytest
import torch
import torch._dynamo as dynamo

from snclr.errors import UserError
from snclr.train.config import resolve
from tests.methods.test_losses import one_by_one
from tests.methods.test_methods import batch, small

# torch reads the gradients of the tensors that cross a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
BREAKS = {"snclr": 1, "mocov3": 1, "mocov2": 0, "byol": 0}  # the log-sum-exp in tiles


def filled(name):
    """A method with features in its queue."""
    method = small(name, **({"symmetric": True} if name == "mocov2" else {}))
    for number in range(2):
        one_by_one(method, *batch(number)[:2])
        method.zero_grad()
        method.after_step(number, 10)
    return method


@pytest.mark.parametrize("name", BREAKS)
def test_a_direction_has_at_most_one_graph_break(name):
    method, calls = filled(name), []
    direction = method.direction
    method.direction = lambda *inputs: calls.append(inputs) or direction(*inputs)
    one_by_one(method, *batch(2)[:2])
    method.leave_kernels_out()
    dynamo.reset()
    found = dynamo.explain(direction)(*calls[0])
    assert found.graph_break_count == BREAKS[name], [reason.reason for reason in found.break_reasons]
    assert found.graph_count == BREAKS[name] + 1
    assert found.op_count > 30  # the encoder is in the graph


@pytest.mark.parametrize("name", ["snclr", "mocov3"])
def test_a_compiled_step_is_the_same(name):
    """With the backend "eager", which runs the captured graphs without generating code."""
    plain, compiled = filled(name), filled(name)
    dynamo.reset()
    compiled.compile_parts(backend="eager")
    outputs = [one_by_one(method, *batch(2)[:2]) for method in (plain, compiled)]
    assert float(outputs[1].loss) == pytest.approx(float(outputs[0].loss), rel=1e-6)
    expected = dict(plain.named_parameters())
    for key, parameter in compiled.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, expected[key].grad, rtol=1e-5, atol=1e-6, msg=key)
    assert plain.state_dict().keys() == compiled.state_dict().keys()


def test_saving_memory_and_compiling_exclude_each_other():
    with pytest.raises(UserError, match="compile excludes micro_batch and activation_checkpointing"):
        resolve({"compile": True, "micro_batch": 8})
