"""One result, whatever the number of processes: the same images, views, queue, loss, gradients and weights."""

import pytest
import torch

from tests.distributed.steps import assert_same_weights, largest_difference, play

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test of each number of processes waits for them

# precision : steps : optimizer : encoder : batch : image size
VIT, RESNET = "32:1:sgd:vit_small:64:32", "32:1:sgd:resnet10-tiny:64:32"
EXACT_RESNET = RESNET.replace("32:", "64:", 1)
DOUBLE = "64:3:adamw:resnet10-tiny:16:16"
SHORT = (VIT, RESNET, DOUBLE)
LONG = "64:200:sgd:test_vit:16:32"  # a ResNet's batch norms take minutes of messages: `make soak` has that one
PLAYS = {1: (*SHORT, LONG, EXACT_RESNET), 2: (*SHORT, LONG), 4: (*SHORT, LONG)}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """What so many processes did, by the steps' names; asked for one number at a time, each is started once."""
    found = {}

    def of(processes):
        if processes not in found:
            found[processes] = play(tmp_path_factory.mktemp("ranks"), processes, *PLAYS[processes])
        return found[processes]

    return of


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("processes", [2, 4])
def test_images_views_and_queue_are_identical(played, processes, name):
    one, several = played(1)[name], played(processes)[name]
    assert torch.equal(one["ids"], several["ids"])
    assert one["views"] == several["views"]
    for buffer in ("ids", "births", "_extra_state"):
        assert torch.equal(one["state"][f"criterion.queue.{buffer}"], several["state"][f"criterion.queue.{buffer}"])
    assert len(torch.unique(one["ids"])) == one["ids"].numel(), "an epoch has each image once"


@pytest.mark.parametrize("processes", [2, 4])
def test_loss_and_gradients_of_a_step_are_equal_in_double_precision(played, processes):
    one, several = played(1)[DOUBLE], played(processes)[DOUBLE]
    assert max(float(part.abs().max()) for part in one["gradients"][0].values()) > 0.01
    assert largest_difference(one, several) <= 1e-10
    assert abs(several["losses"][0] - one["losses"][0]) <= 1e-10


@pytest.mark.parametrize("processes", [2, 4])
def test_loss_and_gradients_of_a_step_are_equal_in_single_precision(played, processes):
    one, several = played(1)[VIT], played(processes)[VIT]
    assert max(float(part.abs().max()) for part in one["gradients"][0].values()) > 0.5
    assert largest_difference(one, several) <= 1e-6
    assert several["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)


@pytest.mark.parametrize("processes", [2, 4])
def test_those_of_a_resnet_are_as_near_as_single_precision_can_tell(played, processes):
    """A convolution's gradient sums over every pixel: one process is itself 5e-6 from the exact step, whose largest
    entry is 1.3. Shorter sums on several processes round less, so they must be no further off."""
    one, several, true = played(1)[RESNET], played(processes)[RESNET], played(1)[EXACT_RESNET]
    assert several["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)
    assert largest_difference(one, true) <= 2e-5
    assert largest_difference(several, true) <= max(1e-6, 1.5 * largest_difference(one, true))


@pytest.mark.parametrize("processes", [2, 4])
def test_two_hundred_steps_in_double_precision_end_at_the_same_weights(played, processes):
    assert_same_weights(played(1)[LONG], played(processes)[LONG], 1e-8)
