"""The result does not depend on the world size: images, views, queue, loss, gradients and weights."""

import pytest
import torch

from tests.distributed.steps import assert_same_weights, largest_difference, play

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test of each world size runs all its steps

# precision : steps : optimizer : encoder : batch : image size
VIT, RESNET = "32:1:sgd:vit_small:64:32", "32:1:sgd:resnet10-tiny:64:32"
EXACT_RESNET = RESNET.replace("32:", "64:", 1)
DOUBLE = "64:3:adamw:resnet10-tiny:16:16"
LONG = "64:60:sgd:test_vit:16:32"  # `make soak` runs 200 steps of a ResNet, whose batch norms take minutes
PLAYS = {1: (VIT, RESNET, DOUBLE, LONG, EXACT_RESNET), 2: (VIT, RESNET, DOUBLE, LONG), 4: (DOUBLE, LONG)}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Return a function from a world size to its results, by the names of the steps; each is computed once."""
    found = {}

    def of(ranks):
        if ranks not in found:
            found[ranks] = play(tmp_path_factory.mktemp("ranks"), ranks, *PLAYS[ranks])
        return found[ranks]

    return of


@pytest.mark.parametrize(("ranks", "name"), [(2, VIT), (2, RESNET), (2, DOUBLE), (4, DOUBLE)])
def test_images_views_and_queue_are_identical(played, ranks, name):
    one, several = played(1)[name], played(ranks)[name]
    assert torch.equal(one["ids"], several["ids"])
    assert one["views"] == several["views"]
    for buffer in ("ids", "pushed_at", "_extra_state"):
        assert torch.equal(one["state"][f"criterion.queue.{buffer}"], several["state"][f"criterion.queue.{buffer}"])
    assert len(torch.unique(one["ids"])) == one["ids"].numel(), "an epoch has each image once"


@pytest.mark.parametrize("ranks", [2, 4])
def test_loss_and_gradients_of_a_step_are_equal_in_double_precision(played, ranks):
    one, several = played(1)[DOUBLE], played(ranks)[DOUBLE]
    assert max(float(part.abs().max()) for part in one["gradients"][0].values()) > 0.01
    assert largest_difference(one, several) <= 1e-10
    assert abs(several["losses"][0] - one["losses"][0]) <= 1e-10


def test_loss_and_gradients_of_a_step_are_equal_in_single_precision(played):
    one, several = played(1)[VIT], played(2)[VIT]
    assert max(float(part.abs().max()) for part in one["gradients"][0].values()) > 0.5
    assert largest_difference(one, several) <= 1e-6
    assert several["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)


def test_gradients_of_a_resnet_are_equal_up_to_the_rounding_of_one_rank(played):
    """A convolution's gradient sums over every pixel: one rank is itself 5e-6 from the exact step, whose largest
    entry is 1.3. Shorter sums on several ranks round less, so they must be no further off."""
    one, several, true = played(1)[RESNET], played(2)[RESNET], played(1)[EXACT_RESNET]
    assert several["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)
    assert largest_difference(one, true) <= 2e-5
    assert largest_difference(several, true) <= max(1e-6, 1.5 * largest_difference(one, true))


@pytest.mark.parametrize("ranks", [2, 4])
def test_sixty_steps_in_double_precision_end_at_the_same_weights(played, ranks):
    assert_same_weights(played(1)[LONG], played(ranks)[LONG], 1e-8)
