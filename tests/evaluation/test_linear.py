from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from snclr.data.datasets.base import ArrayDataset, FileDataset, ImageDataset
from snclr.errors import UserError
from snclr.evaluation import linear
from snclr.evaluation.linear import LEARNING_RATES, LinearScore, linear_cached, paper_lr
from snclr.evaluation.linear_task import LinearHeads, NormalizedHead
from snclr.evaluation.scoring import match_labels, top_accuracies, true_ranks
from snclr.evaluation.session import EvalInputs, Session
from snclr.models.encoders import EncoderSpec
from snclr.runtime.stop import StopFlag


def clusters(n: int, m: int, classes: int, *, dim: int = 10, noise: float = 1.0, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n + m) % classes
    centers = torch.randn(classes, dim, generator=generator)
    features = centers[labels] + noise * torch.randn(n + m, dim, generator=generator)
    return [features[:n], labels[:n], features[n:], labels[n:]]


def colored(n: int, classes: list[str], *, name: str = "colors", seed: int = 0) -> ArrayDataset:
    """Images of one color, a little noisy: red, green, blue by class name."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n, dtype=np.int64) % len(classes)
    paint = {"red": (220, 30, 30), "green": (30, 220, 30), "blue": (30, 30, 220)}
    base = np.array([paint[classes[label]] for label in labels])[:, None, None, :]
    images = np.clip(base + rng.integers(-25, 25, (n, 8, 8, 3)), 0, 255).astype(np.uint8)
    return ArrayDataset(name, images, labels, classes)


def tiny_encoder() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


def linear_probe(
    encoder: nn.Module, train: ImageDataset, test: ImageDataset, *, image_size: int, quiet: bool = True,
    data: str = "sets", **settings: Any,
) -> LinearScore:  # fmt: skip
    """Run the probe on an encoder and datasets in memory, without a run directory."""
    spec = EncoderSpec(
        name="net", library="timm", architecture="net", model_args={}, stem="standard", image_size=image_size,
        num_features=getattr(encoder, "num_features", 8),
    )  # fmt: skip
    inputs = EvalInputs(encoder, spec, train, test, *match_labels(train, test), data, held_out=False)
    session = Session(Path(), "cpu", StopFlag(), quiet, cache=False, workers=0)
    return linear.linear_probe(session, inputs, **settings)


# ---- heads


def test_each_head_matches_torch_sgd() -> None:
    x, y, _, _ = clusters(24, 0, 3, dim=5)
    rates = [0.01, 0.5]
    heads = LinearHeads(5, 3, rates)
    losses = [heads.step(x[part], y[part], scale) for part, scale in _steps()]
    for g, lr in enumerate(rates):
        layer = nn.Linear(5, 3)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        optimizer = torch.optim.SGD(layer.parameters(), lr=lr, momentum=0.9)
        for (part, scale), mine in zip(_steps(), losses, strict=True):
            optimizer.param_groups[0]["lr"] = lr * scale
            optimizer.zero_grad()
            loss = F.cross_entropy(layer(x[part]), y[part])
            loss.backward()
            optimizer.step()
            torch.testing.assert_close(mine[g], loss.detach())
        torch.testing.assert_close(heads.logits(x)[g], layer(x).detach(), rtol=1e-4, atol=1e-5)


def _steps() -> list[tuple[slice, float]]:
    return [(slice(0, 8), 1.0), (slice(8, 24), 0.7), (slice(0, 24), 0.2), (slice(4, 9), 0.1)]


def test_the_head_of_mae_is_a_batch_norm_and_lars() -> None:
    """Against the formulas: standardization by the batch, and steps scaled by ‖w‖ / ‖g‖."""
    x, y, test, _ = clusters(24, 6, 3, dim=5)
    x, test = x * torch.logspace(-2, 2, 5) + 3, test * torch.logspace(-2, 2, 5) + 3
    head = NormalizedHead(5, 3, 2.0, seed=1)
    weight, bias = head.weight.detach().double(), head.bias.detach().double()
    assert 0.005 < float(weight.std()) < 0.02
    assert float(bias.abs().sum()) == 0
    speed, bias_speed = torch.zeros(3, 5).double(), torch.zeros(3).double()
    mean, variance = torch.zeros(5).double(), torch.ones(5).double()
    for part, scale in _steps():
        rows, labels = x[part].double(), F.one_hot(y[part], 3)
        batch_mean, batch_variance = rows.mean(dim=0), rows.var(dim=0, correction=0)
        z = (rows - batch_mean) / torch.sqrt(batch_variance + 1e-6)
        p = (z @ weight.T + bias).softmax(dim=1)
        loss = -(p.log() * labels).sum(dim=1).mean()
        gradient = (p - labels).T @ z / len(z)
        speed = 0.9 * speed + gradient * 0.001 * weight.norm() / gradient.norm()
        bias_speed = 0.9 * bias_speed + (p - labels).mean(dim=0)
        torch.testing.assert_close(head.step(x[part], y[part], scale), loss[None].float(), rtol=1e-4, atol=1e-5)
        weight, bias = weight - 2.0 * scale * speed, bias - 2.0 * scale * bias_speed
        mean = 0.9 * mean + 0.1 * batch_mean
        variance = 0.9 * variance + 0.1 * rows.var(dim=0)
    expected = (test.double() - mean) / torch.sqrt(variance + 1e-6) @ weight.T + bias
    torch.testing.assert_close(head.logits(test)[0], expected.float(), rtol=1e-4, atol=1e-5)


def test_the_head_of_mae_continues_from_its_state() -> None:
    x, y, _, _ = clusters(24, 0, 3, dim=5)
    whole, start, resumed = (NormalizedHead(5, 3, 2.0, seed=seed) for seed in (1, 1, 2))
    for head, parts in ((whole, _steps()), (start, _steps()[:2])):
        for part, scale in parts:
            head.step(x[part], y[part], scale)
    for name, value in resumed.state().items():
        value.copy_(start.state()[name])
    for part, scale in _steps()[2:]:
        resumed.step(x[part], y[part], scale)
    assert torch.equal(resumed.logits(x), whole.logits(x))
    assert torch.isfinite(resumed.step(x[:1], y[:1])).all()  # one image has no variance


def test_the_protocol_of_mae() -> None:
    train, test = colored(30, ["red", "green", "blue"]), colored(15, ["red", "green", "blue"], seed=1)
    options = {"image_size": 8, "epochs": 20, "batch_size": 8, "chunk": 8, "quiet": True}
    score = linear_probe(tiny_encoder(), train, test, protocol="mae", base_lr=500.0, **options)  # type: ignore[arg-type]
    assert score.top1 == 1.0
    again = linear_probe(tiny_encoder(), train, test, protocol="mae", base_lr=500.0, **options)  # type: ignore[arg-type]
    assert again.protocol == score.protocol
    for text in ("batch norm without parameters", "LARS", "20 epochs", "2 epochs of warm-up", "500 × batch/256, given"):
        assert text in score.protocol
    assert "LARS" not in linear_probe(tiny_encoder(), train, test, **options).protocol  # type: ignore[arg-type]
    default = linear_probe(tiny_encoder(), train, test, protocol="mae", image_size=8, epochs=1, quiet=True)
    assert "0.1 × batch/256, MAE's for all encoders" in default.protocol


def test_the_thread_limit_is_restored_after_a_small_fit() -> None:
    before = torch.get_num_threads()
    with LinearHeads(4, 2, [0.1]).fitting_threads(batch=8):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


# ---- scoring


def test_ranks_and_top_k_shares() -> None:
    scores = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0]]).expand(7, 7)
    ranks = true_ranks(scores, torch.arange(7))
    assert ranks.tolist() == list(range(7))
    assert top_accuracies(ranks, 7) == pytest.approx((1 / 7, 5 / 7))
    assert true_ranks(torch.full((2, 3), torch.nan), torch.tensor([0, 2])).tolist() == [3, 3]  # NaN scores rank last
    assert top_accuracies(ranks[:5], 5) == pytest.approx((1 / 5, None))


# ---- cached features


def test_separable_classes_are_learned() -> None:
    result = linear_cached(*clusters(210, 70, 7, noise=0.1))
    assert result.top1 == 1.0
    assert result.top5 == 1.0
    assert result.predictions.tolist() == [i % 7 for i in range(70)]


def test_shuffled_labels_are_not_learned() -> None:
    train, labels, test, _ = clusters(200, 200, 4, noise=5.0)
    shuffled = labels[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    assert linear_cached(train, shuffled, test, shuffled, epochs=20).top1 < 0.5


def test_the_same_seed_gives_the_same_result() -> None:
    sets = clusters(120, 60, 3, noise=3.0)
    first, second = (linear_cached(*sets, epochs=10, seed=4) for _ in range(2))
    assert first.trials == second.trials
    assert torch.equal(first.predictions, second.predictions)
    assert linear_cached(*sets, epochs=10, seed=5).trials != first.trials


def test_the_test_set_does_not_choose_the_learning_rate() -> None:
    train, labels, test, test_labels = clusters(120, 60, 3, noise=3.0)
    fair = linear_cached(train, labels, test, test_labels, epochs=10)
    cheat = linear_cached(train, labels, 100 * test.flip(0), test_labels.flip(0), epochs=10)
    assert cheat.trials == fair.trials
    assert cheat.learning_rate == fair.learning_rate


def test_the_best_learning_rate_on_the_held_out_part_is_chosen() -> None:
    result = linear_cached(*clusters(300, 60, 3, noise=2.0), epochs=10, learning_rates=[0.01, 1e-12, 1.0])
    assert [trial.learning_rate for trial in result.trials] == [1e-12, 0.01, 1.0]
    best = max(result.trials, key=lambda trial: (trial.top1, -trial.loss))
    assert result.learning_rate == best.learning_rate
    assert result.learning_rate > 1e-12


def test_the_final_head_is_trained_on_all_training_images() -> None:
    """Each image has its own feature: those held out for the grid are learned only if the final head sees them."""
    train, labels, _, _ = clusters(20, 0, 2, noise=0.1)
    train = torch.cat([train, torch.zeros(20, 20)], dim=1)
    train[:, 10:] = torch.eye(20)  # a feature of its own for each image
    labels = torch.arange(20) % 2
    result = linear_cached(train[:, 10:], labels, train[:, 10:], labels, learning_rates=[0.1, 1.0])
    assert max(trial.top1 for trial in result.trials) < 1.0  # the held-out images share no feature with the others
    assert result.top1 == 1.0


def test_scale_and_offset_of_the_features_have_no_effect() -> None:
    train, labels, test, test_labels = clusters(120, 60, 3, noise=2.0)
    plain = linear_cached(train, labels, test, test_labels, epochs=10)
    scale, offset = torch.logspace(-3, 3, 10), torch.linspace(-5, 5, 10)
    other = linear_cached(train * scale + offset, labels, test * scale + offset, test_labels, epochs=10)
    assert other.top1 == pytest.approx(plain.top1, abs=0.05)
    assert other.learning_rate == plain.learning_rate


def test_a_constant_feature_has_no_effect() -> None:
    train, labels, test, test_labels = clusters(90, 30, 3, noise=0.1)
    train[:, 0], test[:, 0] = 7.0, 7.0
    assert linear_cached(train, labels, test, test_labels, epochs=30).top1 == 1.0


def test_class_numbers_may_have_gaps_and_unlabeled_rows_are_ignored() -> None:
    train, labels, test, test_labels = clusters(90, 30, 3, noise=0.1)
    numbers = torch.tensor([4, 17, 900])
    holes = numbers[labels]
    holes[::9] = -1
    result = linear_cached(train, holes, test, numbers[test_labels], epochs=30)
    assert result.top1 == 1.0
    assert set(result.predictions.tolist()) == {4, 17, 900}
    assert "80 training and 30 test images, 3 classes, 10 images without a label left out" in result.protocol


def test_the_protocol_of_cached_features_is_complete() -> None:
    result = linear_cached(*clusters(100, 50, 2), epochs=7, batch_size=32, seed=3, data="mine")
    parts = (
        *(
            "cached features",
            "standardized",
            "no augmentation",
            "momentum 0.9",
            "weight decay 0",
            "7 epochs",
            "batch 32",
        ),
        *("cosine", f"learning rate {result.learning_rate:g}", f"best of {len(LEARNING_RATES)}", "held-out tenth"),
        *("trained again", "seed 3", "100 training", "50 test", "(mine)"),
    )
    assert [part for part in parts if part not in result.protocol] == []
    assert "(given)" in linear_cached(*clusters(100, 50, 2), epochs=2, learning_rates=[0.1]).protocol
    edge = linear_cached(*clusters(100, 50, 2, noise=0.1), epochs=2, learning_rates=[1e-9, 1e-8])
    assert "at the edge of the grid" in edge.protocol


def test_one_image_per_class_needs_a_given_learning_rate() -> None:
    x, y = torch.eye(3), torch.arange(3)
    with pytest.raises(UserError, match=r"--lr 0\.1"):
        linear_cached(x, y, x, y)
    assert linear_cached(x, y, x, y, learning_rates=[0.1]).top1 == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"train_labels": None}, "training images have no labels.*subfolder"),
        (lambda s: {"test_labels": None}, "test images have no labels"),
        (lambda s: {"train_labels": torch.zeros_like(s[1])}, "all of one class"),
        (lambda s: {"test_labels": s[3] + 1}, "1 of the test images' classes have no labeled training image"),
        (lambda s: {"train": s[0] / 0}, "not all finite"),
    ],
)
def test_invalid_input_is_refused(change: object, message: str) -> None:
    sets = clusters(30, 12, 3)
    arguments = dict(zip(("train", "train_labels", "test", "test_labels"), sets, strict=True))
    with pytest.raises(UserError, match=message):
        linear_cached(**(arguments | change(sets)))  # type: ignore[operator]


# ---- linear probe


def test_the_probe_learns_and_does_not_change_the_weights() -> None:
    encoder = tiny_encoder().train()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    train, test = colored(60, ["red", "green", "blue"]), colored(15, ["red", "green", "blue"], seed=1)
    result = linear_probe(encoder, train, test, image_size=8, epochs=30, base_lr=3.0, chunk=16, quiet=True)
    assert result.top1 == 1.0
    assert result.top5 is None
    assert result.predictions.tolist() == [i % 3 for i in range(15)]
    after = encoder.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in encoder.parameters())


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("vit_tiny_patch16_224", 3.0), ("deit_tiny_distilled_patch16_224", 3.0), ("beit_base_patch16_224", 3.0),
        ("eva02_tiny_patch14_224", 3.0), ("levit_128s", 0.1), ("mobilevit_xxs", 0.1), ("resnet18", 0.1),
    ],
)  # fmt: skip
def test_the_default_learning_rate_depends_on_the_architecture(name: str, rate: float) -> None:
    with torch.device("meta"):
        assert paper_lr(timm.create_model(name, num_classes=0))[0] == rate


def test_the_protocol_states_where_the_learning_rate_comes_from() -> None:
    train, test = colored(8, ["red", "green"]), colored(4, ["red", "green"], seed=1)
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=16, embed_dim=12, depth=1)
    for encoder, base, text in (
        (vit, None, "(3 × batch/256, the paper's for ViTs)"),
        (tiny_encoder(), None, "(0.1 × batch/256, the paper's for ResNets)"),
        (tiny_encoder(), 0.7, "(0.7 × batch/256, given)"),
    ):
        done = linear_probe(encoder, train, test, image_size=16, epochs=1, base_lr=base, batch_size=8, quiet=True)
        assert text in done.protocol


def test_the_probe_depends_on_the_seed_and_not_on_the_chunk() -> None:
    train, test = colored(40, ["red", "green"]), colored(20, ["red", "green"], seed=1)
    options = {"image_size": 8, "epochs": 2, "batch_size": 16, "quiet": True}

    def probe(seed: int, chunk: int, capture: list[float]) -> Tensor:
        step = LinearHeads.step

        def spy(self: LinearHeads, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
            capture.append(x.sum().item())
            return step(self, x, y, scale)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LinearHeads, "step", spy)
            return linear_probe(tiny_encoder(), train, test, seed=seed, chunk=chunk, **options).predictions

    seen: dict[str, list[float]] = {"a": [], "b": [], "c": []}
    probe(0, 16, seen["a"])
    probe(0, 5, seen["b"])
    probe(1, 16, seen["c"])
    assert len(seen["a"]) == 6  # 16, 16 and the last 8 images, twice
    assert seen["a"] == pytest.approx(seen["b"], rel=1e-5)
    assert seen["a"] != pytest.approx(seen["c"], rel=1e-5)


def test_the_learning_rate_scales_with_the_batch_which_is_at_most_the_dataset() -> None:
    train, test = colored(64, ["red", "green"]), colored(8, ["red", "green"])
    result = linear_probe(tiny_encoder(), train, test, image_size=8, epochs=1, quiet=True, data="colors by hand")
    assert result.learning_rate == pytest.approx(0.1 * 64 / 256)
    parts = (
        *("frozen encoder", "random resized crop and flip at 8 px", "momentum 0.9", "weight decay 0", "1 epoch,"),
        *("batch 64", "cosine to 0", "learning rate 0.025 (0.1 × batch/256,", "seed 0", "center crops"),
        *("64 training and 8 test images, 2 classes", "colors by hand"),
    )
    assert [part for part in parts if part not in result.protocol] == []


def test_classes_are_matched_by_name() -> None:
    train = colored(60, ["red", "green", "blue"])
    test = colored(10, ["blue", "red"], seed=1)
    encoder = tiny_encoder()
    result = linear_probe(encoder, train, test, image_size=8, epochs=30, base_lr=3.0, quiet=True)
    assert result.top1 == 1.0
    assert result.predictions.tolist() == [2, 0] * 5  # in the training set's numbers
    test.classes = ["blue", "crimson"]
    with pytest.raises(UserError, match=r"crimson\. These have red, green, blue"):
        linear_probe(encoder, train, test, image_size=8, quiet=True)


def test_matching_labels_without_names_compares_numbers() -> None:
    train, test = colored(6, ["red", "green"]), colored(4, ["green", "red"])
    train.classes = None
    assert match_labels(train, test)[1] is test.labels


def test_unlabeled_and_unreadable_images_are_left_out(tmp_path: Path) -> None:
    array = colored(24, ["red", "green"])
    names = [f"{i}.png" for i in range(24)]
    for name, image in zip(names, array.images, strict=True):
        Image.fromarray(image).save(tmp_path / name)
    (tmp_path / "5.png").write_bytes(b"no image")
    assert array.labels is not None
    labels = array.labels.copy()
    labels[[0, 1]] = -1
    train = FileDataset("files", tmp_path, names, labels, array.classes)
    result = linear_probe(tiny_encoder(), train, array, image_size=8, epochs=40, base_lr=20.0, batch_size=8, quiet=True)
    assert (result.skipped_training, list(result.skipped)) == (1, [])
    assert result.top1 == 1.0
    assert "22 training and 24 test images, 2 classes, 2 images without a label left out" in result.protocol


def test_the_probe_needs_labels_of_two_classes() -> None:
    train, test = colored(12, ["red", "green"]), colored(4, ["red", "green"])
    assert train.labels is not None
    nameless = ArrayDataset("nameless", train.images)
    alike = ArrayDataset("alike", train.images, np.zeros(12, np.int64), ["red", "green"])
    with pytest.raises(UserError, match=r"training images \(nameless\) have no labels"):
        linear_probe(tiny_encoder(), nameless, test, image_size=8)
    with pytest.raises(UserError, match=r"test images \(nameless\) have no labels"):
        linear_probe(tiny_encoder(), train, nameless, image_size=8)
    with pytest.raises(UserError, match="all of one class"):
        linear_probe(tiny_encoder(), alike, test, image_size=8)


def test_a_dataset_without_readable_images_is_refused(tmp_path: Path) -> None:
    names = ["a.png", "b.png"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    train = FileDataset("broken", tmp_path, names, np.array([0, 1]), ["red", "green"])
    with pytest.raises(UserError, match="none of the labeled images of broken"):
        linear_probe(tiny_encoder(), train, colored(4, ["red", "green"]), image_size=8, epochs=1, quiet=True)
