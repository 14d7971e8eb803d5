"""One result, whatever the number of processes: the same images, views, queue, loss, gradients and weights."""

from pathlib import Path

import pytest
import torch

from tests.distributed.ranks import run

WORKER = str(Path(__file__).parent / "step_worker.py")
# precision : steps : optimiser : encoder : batch : image size
VIT, RESNET = "32:1:sgd:vit_tiny:64:32", "32:1:sgd:resnet10-tiny:64:32"
DOUBLE = "64:3:adamw:resnet10-tiny:16:16"
SHORT = (VIT, RESNET, DOUBLE)
LONG = "64:200:sgd:resnet10-tiny:16:16"


EXTRA = {1: (LONG, "64:1:sgd:vit_tiny:64:32", "64:1:sgd:resnet10-tiny:64:32"), 2: (LONG,), 4: ()}


def exact(name):
    """The same step in double precision."""
    return name.replace("32:", "64:", 1)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """What the same steps did on 1, 2 and 4 processes; the 200 steps on 1 and 2."""
    folder, found = tmp_path_factory.mktemp("ranks"), {}
    for processes in (1, 2, 4):
        out = folder / f"{processes}.pt"
        done = run(processes, WORKER, str(out), *SHORT, *EXTRA[processes])
        assert done.returncode == 0, done.stderr[-3000:]
        found[processes] = torch.load(out, weights_only=True)
    return found


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", SHORT)
def test_images_views_and_queue_are_identical(played, processes, name):
    one, several = played[1][name], played[processes][name]
    assert torch.equal(one["ids"], several["ids"])
    assert one["views"] == several["views"]
    for buffer in ("ids", "births", "_extra_state"):
        assert torch.equal(one["state"][f"criterion.queue.{buffer}"], several["state"][f"criterion.queue.{buffer}"])
    assert len(torch.unique(one["ids"])) == one["ids"].numel(), "an epoch has each image once"


def largest_difference(one, other):
    """Over every entry of every gradient of the first step."""
    first, second = one["gradients"][0], other["gradients"][0]
    assert first.keys() == second.keys()
    assert len(first) > 10
    return max(float((first[key].double() - second[key].double()).abs().max()) for key in first)


@pytest.mark.parametrize("processes", [2, 4])
def test_loss_and_gradients_of_a_step_are_equal_in_double_precision(played, processes):
    one, several = played[1][DOUBLE], played[processes][DOUBLE]
    assert max(float(part.abs().max()) for part in one["gradients"][0].values()) > 0.01
    assert largest_difference(one, several) <= 1e-10
    # Fabric hands a loss of double precision on in single, so its own rounding is the limit there.
    assert several["losses"][0] == pytest.approx(one["losses"][0], rel=2e-7)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", [VIT, RESNET])
def test_in_single_precision_they_are_equal_but_for_rounding(played, processes, name):
    """Loss to 1e-6; gradients to 1e-6, or to what single precision can tell: twice one process's own distance from
    the exact step (torch's batch norm alone rounds at 3e-6 for images in channels-last order)."""
    one, several, true = played[1][name], played[processes][name], played[1][exact(name)]
    assert several["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)
    assert largest_difference(several, true) <= max(1e-6, 2 * largest_difference(one, true))


def test_two_hundred_steps_in_double_precision_end_at_the_same_weights(played):
    one, two = played[1][LONG], played[2][LONG]
    early, late = (sum(one["losses"][part]) for part in (slice(10, 30), slice(-20, None)))  # the queue is full by 10
    assert late < early, "the steps must have moved the weights for this to say anything"
    for key, value in one["state"].items():
        if value.is_floating_point():
            assert float((two["state"][key] - value).abs().max()) <= 1e-8 * max(1.0, float(value.abs().max())), key
        else:
            assert torch.equal(two["state"][key], value), key
