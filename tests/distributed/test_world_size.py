"""The result does not depend on the world size: images, views, queue, loss, gradients and weights."""

import pytest
import torch

from tests.distributed.steps import assert_same_weights, largest_difference, run_cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test of each world size runs all its steps

# precision : steps : optimizer : encoder : batch : image size
VIT, RESNET = "32:1:sgd:vit_small:64:32", "32:1:sgd:resnet10-tiny:64:32"
EXACT_RESNET = RESNET.replace("32:", "64:", 1)
DOUBLE = "64:3:adamw:resnet10-tiny:16:16"
LONG = "64:60:sgd:test_vit:16:32"  # `make soak` runs 200 steps of a ResNet, whose batch norms take minutes
CASES = {1: (VIT, RESNET, DOUBLE, LONG, EXACT_RESNET), 2: (VIT, RESNET, DOUBLE, LONG), 4: (DOUBLE, LONG)}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return a function from a world size to its results by case; each is computed once."""
    found = {}

    def of(ranks):
        if ranks not in found:
            found[ranks] = run_cases(tmp_path_factory.mktemp("ranks"), ranks, *CASES[ranks])
        return found[ranks]

    return of


@pytest.mark.parametrize(("ranks", "name"), [(2, VIT), (2, RESNET), (2, DOUBLE), (4, DOUBLE)])
def test_images_views_and_queue_are_identical(results, ranks, name):
    one, several = results(1)[name], results(ranks)[name]
    assert torch.equal(one["ids"], several["ids"])
    assert one["views"] == several["views"]
    for buffer in ("ids", "pushed_at", "_extra_state"):
        assert torch.equal(one["state"][f"criterion.queue.{buffer}"], several["state"][f"criterion.queue.{buffer}"])
    assert len(torch.unique(one["ids"])) == one["ids"].numel(), "an epoch has each image once"


@pytest.mark.parametrize("ranks", [2, 4])
def test_loss_and_gradients_of_a_step_are_equal_in_double_precision(results, ranks):
    one, several = results(1)[DOUBLE], results(ranks)[DOUBLE]
    assert max(float(part.abs().max()) for part in one["gradients"][0].values()) > 0.01
    assert largest_difference(one, several) <= 1e-10
    assert abs(several["losses"][0] - one["losses"][0]) <= 1e-10


def test_loss_and_gradients_of_a_step_are_equal_in_single_precision(results):
    one, several = results(1)[VIT], results(2)[VIT]
    assert max(float(part.abs().max()) for part in one["gradients"][0].values()) > 0.5
    assert largest_difference(one, several) <= 1e-6
    assert several["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)


def test_gradients_of_a_resnet_are_equal_up_to_the_rounding_of_one_rank(results):
    """A convolution's gradient sums over every pixel: one rank is itself 5e-6 from the exact step, whose largest
    entry is 1.3. Shorter sums on several ranks round less, so they must be no further off."""
    one, several, true = results(1)[RESNET], results(2)[RESNET], results(1)[EXACT_RESNET]
    assert several["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)
    assert largest_difference(one, true) <= 2e-5
    assert largest_difference(several, true) <= max(1e-6, 1.5 * largest_difference(one, true))


@pytest.mark.parametrize("ranks", [2, 4])
def test_sixty_steps_in_double_precision_end_at_the_same_weights(results, ranks):
    assert_same_weights(results(1)[LONG], results(ranks)[LONG], 1e-8)
