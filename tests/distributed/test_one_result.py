"""One result, whatever the number of processes: the same images, views, queue, loss, gradients and weights."""

from pathlib import Path

import pytest
import torch

from tests.distributed.ranks import run

WORKER = str(Path(__file__).parent / "step_worker.py")
# precision : steps : optimiser : encoder : batch : image size
VIT, RESNET = "32:1:sgd:vit_small:64:32", "32:1:sgd:resnet10-tiny:64:32"
EXACT_RESNET = RESNET.replace("32:", "64:", 1)
DOUBLE = "64:3:adamw:resnet10-tiny:16:16"
LONG = "64:200:sgd:resnet10-tiny:16:16"
SHORT = (VIT, RESNET, DOUBLE)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """What the same steps did on 1, 2 and 4 processes."""
    folder, found = tmp_path_factory.mktemp("ranks"), {}
    for processes in (1, 2, 4):
        out = folder / f"{processes}.pt"
        done = run(processes, WORKER, str(out), *SHORT, LONG, *([EXACT_RESNET] if processes == 1 else []))
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
def test_loss_and_gradients_of_a_step_are_equal_in_single_precision(played, processes):
    one, several = played[1][VIT], played[processes][VIT]
    assert max(float(part.abs().max()) for part in one["gradients"][0].values()) > 0.1
    assert largest_difference(one, several) <= 1e-6
    assert several["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)


@pytest.mark.parametrize("processes", [2, 4])
def test_with_batch_norm_in_single_precision_they_are_as_near_as_it_can_tell(played, processes):
    """Torch's batch norm rounds at 3e-6 for images in channels-last order, on one process. So here: not
    farther from the exact gradients than twice what one process is."""
    one, several, true = played[1][RESNET], played[processes][RESNET], played[1][EXACT_RESNET]
    assert several["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)
    assert largest_difference(several, true) <= max(1e-6, 2 * largest_difference(one, true))
    assert largest_difference(one, true) < 2e-5


@pytest.mark.parametrize("processes", [2, 4])
def test_two_hundred_steps_in_double_precision_end_at_the_same_weights(played, processes):
    one, several = played[1][LONG], played[processes][LONG]
    early, late = (sum(one["losses"][part]) for part in (slice(10, 30), slice(-20, None)))  # the queue is full by 10
    assert late < early, "the steps must have moved the weights for this to say anything"
    for key, value in one["state"].items():
        if value.is_floating_point():
            assert float((several["state"][key] - value).abs().max()) <= 1e-8 * max(1.0, float(value.abs().max())), key
        else:
            assert torch.equal(several["state"][key], value), key
